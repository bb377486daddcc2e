//! Packs: gzip, tar, members, JSON.

use super::cache::{kernel, tuning};
use super::{Surface, folder, promise};
use crate::mutate;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use moesaic_cache::Store;
use moesaic_spec::testing::SampleRng;
use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A pack of two kernels and a tuning.
pub struct Pack {
    folder: TempDir,
    pack: Vec<u8>,
    tar: Vec<u8>,
    /// Contents of the store after importing it.
    whole: BTreeMap<PathBuf, Vec<u8>>,
}

/// Returns every file below a folder without following links.
pub(super) fn files(folder: &Path) -> Vec<PathBuf> {
    let mut list = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            list.extend(files(&entry.path()))
        } else {
            list.push(entry.path())
        }
    }
    list.sort();
    list
}

fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let relative = |path: PathBuf| {
        let bytes = fs::read(&path).unwrap_or_default();
        (
            path.strip_prefix(folder)
                .map_or(path.clone(), Path::to_path_buf),
            bytes,
        )
    };
    files(folder).into_iter().map(relative).collect()
}

fn zipped(tar: &[u8]) -> Vec<u8> {
    let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
    gz.write_all(tar).expect("memory");
    gz.finish().expect("memory")
}

impl Pack {
    /// Makes a surface with a pack exported from a store of its own.
    pub fn new() -> Pack {
        let folder = folder();
        let from = Store::open(folder.path().join("from"));
        for name in ["dispatch", "combine"] {
            let (key, source, stored) = kernel(name);
            from.put(&key, &source, &stored).expect("a store");
        }
        from.keep_tuned(&tuning()).expect("a store");
        let path = folder.path().join("pack.tar.gz");
        from.export(&path, |_| true).expect("a pack");
        let pack = fs::read(&path).expect("it is there");
        let mut tar = Vec::new();
        GzDecoder::new(&*pack)
            .read_to_end(&mut tar)
            .expect("a whole pack");
        let to = folder.path().join("whole");
        Store::open(&to).import(&path).expect("a whole pack");
        let whole = contents(&to);
        Pack {
            folder,
            pack,
            tar,
            whole,
        }
    }

    /// Changes one header of the tar and corrects its checksum.
    fn forged(&self, rng: &mut SampleRng) -> Vec<u8> {
        let mut tar = self.tar.clone();
        let heads: Vec<usize> = (0..tar.len() / 512)
            .map(|i| i * 512)
            .filter(|at| tar[at + 257..].starts_with(b"ustar"))
            .collect();
        let at = rng.pick(&heads);
        let mut field = |from: usize, length: usize, text: &[u8]| {
            let padded = text.iter().copied().chain(std::iter::repeat(0));
            tar[at + from..at + from + length]
                .iter_mut()
                .zip(padded)
                .for_each(|(byte, new)| *byte = new);
        };
        match rng.between(0, 5) {
            0 => field(
                0,
                100,
                rng.pick(&[
                    "../../x",
                    "/x",
                    "",
                    "tuned/../../x.json",
                    "moesaic-pack.json",
                    "a\nb",
                    "é.kernel",
                ])
                .as_bytes(),
            ),
            1 => field(
                124,
                12,
                rng.pick(&[
                    "0",
                    "1",
                    "77777777777",
                    "00000001000",
                    "-1",
                    "x",
                    "00000000777",
                ])
                .as_bytes(),
            ),
            2 => field(156, 1, &[rng.pick(b"012345678gxLKSMVN\0Z")]),
            3 => field(157, 100, b"../../x"),
            4 => field(
                124,
                12,
                &[
                    0x80,
                    0,
                    0,
                    0,
                    rng.bits() as u8,
                    0xff,
                    0xff,
                    0xff,
                    0xff,
                    0xff,
                    0xff,
                    0xff,
                ],
            ),
            _ => field(345, 155, b"../.."),
        }
        tar[at + 148..at + 156].fill(b' ');
        let sum: u32 = tar[at..at + 512].iter().map(|byte| u32::from(*byte)).sum();
        tar[at + 148..at + 156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        tar
    }

    /// Changes JSON members of the tar in place.
    fn retold(&self, rng: &mut SampleRng) -> Vec<u8> {
        let text = |from: &str, to: &str| {
            let at = self
                .tar
                .windows(from.len())
                .position(|piece| piece == from.as_bytes());
            let mut tar = self.tar.clone();
            if let Some(at) = at {
                tar[at..at + from.len()].copy_from_slice(&to.as_bytes()[..from.len()]);
            }
            tar
        };
        let layer = tuning().layer;
        match rng.between(0, 4) {
            0 => text(&layer, &format!("/../../../x{layer}")),
            1 => text(&layer, &format!("..{layer}")),
            2 => text("\"kernels\":2", "\"kernels\":9"),
            3 => text("cpu:avx2", "cpu:neon"),
            _ => text("\"tokens\": 64", "\"tokens\": -1"),
        }
    }
}

impl Surface for Pack {
    fn name(&self) -> &'static str {
        "pack"
    }

    fn share(&self) -> u64 {
        30
    }

    fn input(&mut self, rng: &mut SampleRng) -> Vec<u8> {
        match rng.between(0, 5) {
            0 | 1 => mutate::bytes(rng, &self.pack),
            2 => zipped(&mutate::bytes(rng, &self.tar)),
            3 | 4 => zipped(&self.forged(rng)),
            _ => zipped(&self.retold(rng)),
        }
    }

    fn check(&mut self, input: &[u8]) -> Result<bool, String> {
        let path = self.folder.path().join("pack.tar.gz");
        fs::write(&path, input).map_err(|error| error.to_string())?;
        let around = self.folder.path().join("around");
        let cache = around.join("a/b/c/cache");
        let imported = Store::open(&cache).import(&path);
        let found = contents(&cache);
        let outside = files(&around)
            .into_iter()
            .find(|file| !file.starts_with(&cache));
        let _ = fs::remove_dir_all(&around);
        promise(outside.is_none(), || format!("it wrote {outside:?}"))?;
        match imported {
            Err(_) => promise(found.is_empty(), || {
                format!("refused, and left {:?}", found.keys())
            })?,
            Ok(_) => {
                for (name, bytes) in &found {
                    // A tuning is JSON without a hash of its own; gzip's
                    // checksum covers it.
                    let same = self.whole.get(name) == Some(bytes) || name.starts_with("v1/tuned");
                    promise(same, || {
                        format!("{} is not what was packed", name.display())
                    })?;
                }
                let plain =
                    |name: &PathBuf| name.starts_with("v1") && name.components().count() == 3;
                promise(found.keys().all(plain), || {
                    format!("odd files: {:?}", found.keys())
                })?;
            }
        }
        Ok(imported.is_ok())
    }

    /// Deflate makes up to 1032 of one.
    fn memory(&self, length: usize) -> usize {
        (8 << 20) + 1100 * length
    }

    fn work(&self, length: usize) -> usize {
        (64 << 20) + 8000 * length
    }
}
