//! Maintenance of a store: list, verify, prune.

use crate::layout::{Found, Kind};
use crate::{KernelInfo, KernelKey, Store, format, lock, store};
use std::collections::{HashMap, HashSet};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// A kernel in a listing.
#[derive(Clone, Debug, PartialEq)]
pub struct Listed {
    /// Its key.
    pub key: KernelKey,
    /// Its description.
    pub info: KernelInfo,
    /// Its file.
    pub path: PathBuf,
    /// Bytes of the file.
    pub bytes: u64,
    /// The time it was written or last used, to within a day.
    pub used: SystemTime,
}

/// The treatment of bad entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnBad {
    /// Only report them.
    Report,
    /// Remove them.
    Remove,
}

/// The result of checking every kernel.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Verified {
    /// The number of kernels whose contents match their hash.
    pub good: usize,
    /// The damaged entries.
    pub bad: Vec<Bad>,
    /// The sources that are not what their kernel was made from. People read them; the kernels
    /// beside them are good, and run.
    pub bad_sources: Vec<Bad>,
    /// The number of unfinished files of killed processes; harmless, see [`Store::prune`].
    pub leftovers: usize,
}

/// A damaged file.
#[derive(Clone, Debug, PartialEq)]
pub struct Bad {
    /// Its file.
    pub path: PathBuf,
    /// The damage.
    pub reason: String,
    /// Whether it was removed.
    pub removed: bool,
}

/// The limits that pruning enforces. The least recently used kernels go first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PruneRule {
    /// The most bytes to keep, sources included.
    pub max_bytes: Option<u64>,
    /// The longest time since a kernel's last use.
    pub max_age: Option<Duration>,
}

/// The result of pruning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// The number of kernels removed.
    pub removed: usize,
    /// The bytes freed, leftovers included.
    pub freed: u64,
    /// The number of kernels that had to go and could not be removed, as from another user's
    /// directory.
    pub stuck: usize,
    /// The number of kernels kept.
    pub kept: usize,
    /// The bytes kept.
    pub kept_bytes: u64,
}

/// The age below which an unfinished file may still be in use by its writer.
const WRITING: Duration = Duration::from_secs(60 * 60);

impl Store {
    /// Returns every good kernel, sorted by target and name.
    pub fn list(&self) -> Vec<Listed> {
        let files = self.layout.scan();
        let mut list: Vec<Listed> = files.iter().filter_map(listed).collect();
        list.sort_by(|a, b| order(a).cmp(&order(b)));
        list
    }

    /// Reads and hashes every kernel, and the source beside it.
    pub fn verify(&self, on_bad: OnBad) -> Verified {
        let mut verified = Verified::default();
        for file in self.layout.scan() {
            match file.kind {
                Kind::Kernel(key) => match check(&key, &file) {
                    Ok(info) => {
                        verified.good += 1;
                        let source = self.bad_source(&key, &info, on_bad);
                        verified.bad_sources.extend(source);
                    }
                    Err(reason) => {
                        let removed = on_bad == OnBad::Remove && self.remove(&key);
                        verified.bad.push(Bad {
                            path: file.path,
                            reason,
                            removed,
                        });
                    }
                },
                Kind::Temporary => verified.leftovers += 1,
                Kind::Source(_) | Kind::Lock => {}
            }
        }
        verified
    }

    /// Checks the source beside a good kernel. A kernel may be without one.
    fn bad_source(&self, key: &KernelKey, info: &KernelInfo, on_bad: OnBad) -> Option<Bad> {
        let path = self.layout.source(key, info.language);
        let reason = match store::peek(&path) {
            Ok(bytes) if format::is_source_of(&bytes, info) => return None,
            Ok(_) => "not the text that the kernel beside it was made from".to_string(),
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            Err(error) => error.to_string(),
        };
        let removed = on_bad == OnBad::Remove && std::fs::remove_file(&path).is_ok();
        Some(Bad {
            path,
            reason,
            removed,
        })
    }

    /// Removes kernels until the rule holds, and the leftovers of killed processes. Touches only
    /// the store's own files.
    pub fn prune(&self, rule: &PruneRule) -> Pruned {
        let files = self.layout.scan();
        let now = SystemTime::now();
        let mut pruned = Pruned {
            freed: sweep(&files, now),
            ..Pruned::default()
        };
        let mut kernels = sizes(&files);
        kernels.sort_by(|a, b| b.used.cmp(&a.used).then(a.key.cmp(&b.key)));
        let mut newer = 0;
        for kernel in kernels {
            // The most recently used kernels come first, so this is the size of all that are at
            // least as recent.
            newer += kernel.bytes;
            let stays = rule.max_bytes.is_none_or(|max| newer <= max)
                && rule.max_age.is_none_or(|max| age(kernel.used, now) <= max);
            if stays {
                pruned.kept += 1;
                pruned.kept_bytes += kernel.bytes;
            } else if self.remove(&kernel.key) {
                pruned.removed += 1;
                pruned.freed += kernel.bytes;
            } else if self.layout.kernel(&kernel.key).symlink_metadata().is_ok() {
                // One that is gone was removed by another process meanwhile.
                pruned.stuck += 1;
            }
        }
        pruned
    }
}

fn order(listed: &Listed) -> (String, &str, KernelKey) {
    (
        listed.info.target.to_string(),
        &listed.info.name,
        listed.key,
    )
}

fn listed(file: &Found) -> Option<Listed> {
    let Kind::Kernel(key) = file.kind else {
        return None;
    };
    let info = check(&key, file).ok()?;
    let used = file.meta.modified().ok()?;
    Some(Listed {
        key,
        info,
        path: file.path.clone(),
        bytes: file.meta.len(),
        used,
    })
}

fn check(key: &KernelKey, file: &Found) -> Result<KernelInfo, String> {
    let bytes = store::peek(&file.path).map_err(|error| error.to_string())?;
    format::decode(key, bytes).map(|stored| stored.info)
}

fn age(used: SystemTime, now: SystemTime) -> Duration {
    now.duration_since(used).unwrap_or_default()
}

struct Sized {
    key: KernelKey,
    bytes: u64,
    used: SystemTime,
}

/// Returns the kernels with the sizes of their sources added.
fn sizes(files: &[Found]) -> Vec<Sized> {
    let mut sources = HashMap::new();
    for file in files {
        if let Kind::Source(key) = file.kind {
            *sources.entry(key).or_insert(0) += file.meta.len();
        }
    }
    let sized = |file: &Found| {
        let Kind::Kernel(key) = file.kind else {
            return None;
        };
        let bytes = file.meta.len() + sources.get(&key).copied().unwrap_or(0);
        Some(Sized {
            key,
            bytes,
            used: file.meta.modified().ok()?,
        })
    };
    files.iter().filter_map(sized).collect()
}

/// Removes unfinished files, abandoned locks and sources without a kernel. Returns their bytes.
fn sweep(files: &[Found], now: SystemTime) -> u64 {
    let kernel = |file: &Found| match file.kind {
        Kind::Kernel(key) => Some(key),
        _ => None,
    };
    let kernels: HashSet<KernelKey> = files.iter().filter_map(kernel).collect();
    let old = |file: &Found| {
        let used = file.meta.modified().unwrap_or(now);
        age(used, now) > WRITING
    };
    let goes = |file: &&Found| match file.kind {
        Kind::Kernel(_) => false,
        // The source is written after its kernel, so a young one may belong to a kernel written
        // since the scan.
        Kind::Source(key) => !kernels.contains(&key) && old(file),
        Kind::Temporary => old(file),
        Kind::Lock => lock::is_abandoned(&file.path),
    };
    let removed = files
        .iter()
        .filter(goes)
        .filter(|file| std::fs::remove_file(&file.path).is_ok());
    removed.map(|file| file.meta.len()).sum()
}
