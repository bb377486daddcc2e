//! The caches of a core, as the system reports them.

use moesaic_kernel::CpuCaches;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::OnceLock;

/// Returns the known caches of this machine's cores: the smallest among all
/// processors that this process may use. The function reads some files for each
/// processor, once; the processors of the first caller's thread count for the
/// process.
pub fn host_caches() -> CpuCaches {
    static CACHES: OnceLock<CpuCaches> = OnceLock::new();
    *CACHES.get_or_init(|| {
        let processors = crate::affinity::processors().unwrap_or_default();
        read_caches(Path::new("/sys/devices/system/cpu"), &processors)
    })
}

/// Reads the caches of some processors from a folder with the layout of Linux:
/// `cpu0/cache/index0/{level,type,size}`.
pub fn read_caches(dir: &Path, processors: &[usize]) -> CpuCaches {
    let each = processors.iter().map(|processor| {
        let caches = dir.join(format!("cpu{processor}/cache"));
        let entries = fs::read_dir(caches).into_iter().flatten().flatten();
        let each = entries.filter_map(|entry| one(&entry.path()));
        each.fold(CpuCaches::default(), CpuCaches::least)
    });
    each.fold(CpuCaches::default(), CpuCaches::least)
}

/// The caches of one level, as many as the threads of a device use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedCaches {
    /// The level: 2 or higher.
    pub level: u8,
    /// The bytes of all of them.
    pub bytes: u64,
}

/// Returns the caches from level 2 on that `threads` threads of this process
/// use together, smallest first.
pub fn shared_by(threads: usize) -> Vec<SharedCaches> {
    let mut processors = crate::affinity::processors().unwrap_or_default();
    processors.truncate(threads);
    read_shared(Path::new("/sys/devices/system/cpu"), &processors)
}

/// Reads the caches that some processors share, each once, from a folder with
/// the layout of Linux: `cpu0/cache/index0/{level,type,size,shared_cpu_list}`.
fn read_shared(dir: &Path, processors: &[usize]) -> Vec<SharedCaches> {
    let mut seen = BTreeSet::new();
    let mut levels: BTreeMap<u8, u64> = BTreeMap::new();
    for processor in processors {
        let caches = dir.join(format!("cpu{processor}/cache"));
        let entries = fs::read_dir(caches).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            let Some((level, size)) = level_and_size(&path) else {
                continue;
            };
            let users = read(&path, "shared_cpu_list").unwrap_or(processor.to_string());
            if level >= 2 && seen.insert((level, users)) {
                *levels.entry(level).or_default() += size;
            }
        }
    }
    let each = levels.into_iter();
    each.map(|(level, bytes)| SharedCaches { level, bytes })
        .collect()
}

/// Returns a cache's level and bytes if data go through it and both are known.
fn level_and_size(dir: &Path) -> Option<(u8, u64)> {
    if !["Data", "Unified"].contains(&read(dir, "type")?.as_str()) {
        return None;
    }
    Some((
        read(dir, "level")?.parse().ok()?,
        bytes(&read(dir, "size")?)?,
    ))
}

fn read(dir: &Path, name: &str) -> Option<String> {
    Some(fs::read_to_string(dir.join(name)).ok()?.trim().to_string())
}

/// Returns one cache if data go through it and its level and size are known.
fn one(dir: &Path) -> Option<CpuCaches> {
    let (level, size) = level_and_size(dir)?;
    let mut caches = CpuCaches::default();
    let own = match level {
        1 => &mut caches.l1_bytes,
        2 => &mut caches.l2_bytes,
        _ => return None,
    };
    *own = Some(size);
    Some(caches)
}

/// Parses `48K`, `2M` or `4096`.
fn bytes(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = match &text[digits.len()..] {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        _ => return None,
    };
    let bytes = digits.parse::<u64>().ok()?.checked_mul(unit)?;
    (bytes > 0).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a tree; a cache is `cpu, index, level, type, size`.
    fn tree(caches: &[(usize, usize, &str, &str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (cpu, index, level, kind, size) in caches {
            let dir = root.path().join(format!("cpu{cpu}/cache/index{index}"));
            fs::create_dir_all(&dir).unwrap();
            for (name, text) in [("level", level), ("type", kind), ("size", size)] {
                fs::write(dir.join(name), format!("{text}\n")).unwrap();
            }
        }
        root
    }

    fn check(root: &Path, processors: &[usize], l1: Option<u64>, l2: Option<u64>) {
        let kib = |size: Option<u64>| size.map(|size| size << 10);
        let expected = CpuCaches {
            l1_bytes: kib(l1),
            l2_bytes: kib(l2),
        };
        assert_eq!(read_caches(root, processors), expected);
    }

    #[test]
    fn data_caches_of_both_levels_are_read() {
        let root = tree(&[
            (0, 0, "1", "Data", "48K"),
            (0, 1, "1", "Instruction", "16K"),
            (0, 2, "2", "Unified", "2048K"),
            (0, 3, "3", "Unified", "1K"),
        ]);
        check(root.path(), &[0], Some(48), Some(2048));
    }

    #[test]
    fn a_shared_cache_counts_once() {
        let root = tree(&[
            (0, 0, "1", "Data", "32K"),
            (0, 2, "2", "Unified", "1M"),
            (0, 3, "3", "Unified", "32M"),
            (1, 2, "2", "Unified", "1M"),
            (1, 3, "3", "Unified", "32M"),
        ]);
        for cpu in [0, 1] {
            let file = format!("cpu{cpu}/cache/index3/shared_cpu_list");
            fs::write(root.path().join(file), "0-1\n").unwrap();
        }
        let shared = |level, bytes| SharedCaches { level, bytes };
        let both = read_shared(root.path(), &[0, 1]);
        assert_eq!(both, [shared(2, 2 << 20), shared(3, 32 << 20)]);
        let one = read_shared(root.path(), &[0]);
        assert_eq!(one, [shared(2, 1 << 20), shared(3, 32 << 20)]);
        assert_eq!(read_shared(root.path(), &[7]), []);
    }

    #[test]
    fn the_smallest_of_the_processors_counts() {
        let root = tree(&[
            (0, 0, "1", "Data", "64K"),
            (0, 1, "2", "Unified", "1M"),
            (1, 0, "1", "Data", "32K"),
            (1, 1, "2", "Unified", "524288"),
            (2, 0, "1", "Data", "8K"),
            (2, 1, "2", "Unified", "8K"),
        ]);
        check(root.path(), &[0], Some(64), Some(1024));
        check(root.path(), &[0, 1], Some(32), Some(512));
        check(root.path(), &[0, 1, 7], Some(32), Some(512));
        check(root.path(), &[], None, None);
    }

    #[test]
    fn what_cannot_be_read_is_not_known() {
        for odd in [
            "",
            "K",
            "-1K",
            "48k",
            "48 K",
            "0K",
            "1e3",
            "K48",
            "99999999999999999999",
        ] {
            let root = tree(&[
                (0, 0, "1", "Data", odd),
                (0, 1, "2", "Unified", "512K"),
                (0, 2, odd, "Data", "1K"),
                (0, 3, "1", odd, "1K"),
            ]);
            check(root.path(), &[0], None, Some(512));
        }
        let root = tree(&[(0, 0, "1", "Data", "32K"), (0, 1, "2", "Unified", "1M")]);
        let cache = root.path().join("cpu0/cache");
        fs::remove_file(cache.join("index1/size")).unwrap();
        fs::create_dir(cache.join("index1/size")).unwrap();
        fs::write(cache.join("index2"), "a file").unwrap();
        fs::write(cache.join("index0/level"), [0xff, 0xfe]).unwrap();
        check(root.path(), &[0], None, None);
        check(&root.path().join("missing"), &[0], None, None);
    }
}
