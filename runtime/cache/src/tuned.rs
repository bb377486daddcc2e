//! Tunings: sizes chosen for a layer by measurements on one machine, for each measured number of
//! tokens.
//!
//! They are small files beside the kernels. The caller defines the meaning of a size. A tuning
//! lists the sources of the kernels that its sizes lead to, so that a pack can include it with
//! them.

use crate::files::{self, Care};
use crate::{Store, StoreError, hash_source, store};
use moesaic_kernel::Target;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

/// The properties of a machine that determine times.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TunedMachine {
    /// The device's name, for a CPU its model.
    pub name: String,
    /// Threads that run kernels.
    pub threads: u32,
}

/// The measured result for one layer on one machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuned {
    /// The target.
    pub target: Target,
    /// The hash of everything that determines the layer's kernels except a tuning.
    pub layer: String,
    /// The machine of the measurement.
    pub machine: TunedMachine,
    /// The layer's name, for people.
    pub name: String,
    /// The best sizes for each number of tokens, ascending.
    pub buckets: Vec<Bucket>,
}

/// The measured result for one number of tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bucket {
    /// The number of tokens.
    pub tokens: usize,
    /// Sizes that beat the default, by name.
    pub sizes: BTreeMap<String, usize>,
    /// [`hash_source`] of each kernel with such sizes; empty without sizes.
    pub kernels: Vec<String>,
    /// The default's time divided by the tuned layer's.
    pub gain: f64,
}

/// The reason bytes are not a usable tuning.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unread {
    /// A former version, which had the same sizes for all numbers of tokens.
    #[error("it is an earlier version's; `moesaic tune` measures again")]
    Former,
    /// Another target, layer or machine.
    #[error("it is for {found}, not for {wanted}")]
    Foreign { found: String, wanted: String },
    /// Damage, with a description.
    #[error("{0}")]
    Damaged(String),
}

/// The part of a former version's tuning that identifies it.
#[derive(Deserialize)]
struct Former {
    #[serde(rename = "sizes")]
    _sizes: BTreeMap<String, usize>,
}

/// An upper bound on the length of a tuning, in bytes.
const LARGEST: usize = 1 << 16;

impl Tuned {
    /// Returns the kernels of all buckets.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        let each = self.buckets.iter();
        each.flat_map(|bucket| bucket.kernels.iter().map(String::as_str))
    }

    /// Returns the first property that is not the wanted one.
    fn foreign(&self, target: Target, layer: &str, machine: &TunedMachine) -> Option<Unread> {
        let is = [
            self.target.to_string(),
            format!("layer {}", self.layer),
            self.machine.words(),
        ];
        let wanted = [
            target.to_string(),
            format!("layer {layer}"),
            machine.words(),
        ];
        let mut pairs = is.into_iter().zip(wanted);
        let (found, wanted) = pairs.find(|(found, wanted)| found != wanted)?;
        Some(Unread::Foreign { found, wanted })
    }

    /// Returns the name of its file.
    pub(crate) fn file_name(&self) -> String {
        file_name(self.target, &self.layer, &self.machine)
    }
}

impl TunedMachine {
    fn words(&self) -> String {
        format!("{} threads of {}", self.threads, self.name)
    }
}

fn prefix(target: Target, layer: &str) -> String {
    // File names stay short. The full hash is in the file and is compared after reading.
    let short = layer.get(..16).unwrap_or(layer);
    format!("{}.{short}.", target.file_name())
}

fn file_name(target: Target, layer: &str, machine: &TunedMachine) -> String {
    let machine = hash_source(&machine.words());
    format!("{}{}.json", prefix(target, layer), &machine[..16])
}

/// The start of a file: the hash of the rest, which is JSON without this line.
const HEAD: &str = "{\n  \"check\": \"";

/// Returns the bytes of a file.
pub(crate) fn encode(tuned: &Tuned) -> Result<Vec<u8>, serde_json::Error> {
    let body = serde_json::to_string_pretty(tuned)? + "\n";
    let body = body.strip_prefix("{\n").unwrap_or(&body);
    Ok(format!("{HEAD}{}\",\n{body}", hash_source(body)).into_bytes())
}

/// Returns the content after the hash, if the hash is right.
fn checked(bytes: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(bytes).ok()?;
    let (hash, body) = text.strip_prefix(HEAD)?.split_once("\",\n")?;
    (hash == hash_source(body)).then(|| format!("{{\n{body}"))
}

/// Reads a tuning. Sizes steer launches, so a file is rejected unless its bytes are those that were
/// written.
pub(crate) fn decode(bytes: &[u8]) -> Result<Tuned, Unread> {
    if bytes.len() > LARGEST {
        return Err(Unread::Damaged("too long for a tuning".to_string()));
    }
    let Some(text) = checked(bytes) else {
        // The former format had no checksum, so it is recognized by its fields.
        let former = serde_json::from_slice::<Former>(bytes).is_ok();
        let reason = "its bytes do not have the hash that it names";
        return Err(if former {
            Unread::Former
        } else {
            Unread::Damaged(reason.to_string())
        });
    };
    let tuned: Tuned =
        serde_json::from_str(&text).map_err(|error| Unread::Damaged(error.to_string()))?;
    if is_hash(&tuned.layer) {
        Ok(tuned)
    } else {
        Err(Unread::Damaged("its layer is not a hash".to_string()))
    }
}

/// Returns true for hexadecimal digits. They become file names, so a path in their place would lead
/// out of the store.
fn is_hash(text: &str) -> bool {
    let digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    !text.is_empty() && text.bytes().all(digit)
}

impl Store {
    /// Returns true if there is any tuning for this target.
    #[doc(hidden)]
    pub fn has_tunings(&self, target: Target) -> bool {
        let prefix = format!("{}.", target.file_name());
        !self.tuning_files(&prefix).is_empty()
    }

    /// Returns the tuning of a layer, named by [`Tuned::layer`], on a machine. One that is damaged,
    /// unreadable or foreign is reported to `tracing` and counts as absent.
    #[doc(hidden)]
    pub fn tuned(&self, target: Target, layer: &str, machine: &TunedMachine) -> Option<Tuned> {
        self.off_is_none()?;
        let path = self.tuned_dir().join(file_name(target, layer, machine));
        let found = self.read_tuned(&path)?;
        match found.foreign(target, layer, machine) {
            Some(reason) => {
                pass_over(&path, &reason);
                None
            }
            None => Some(found),
        }
    }

    /// Returns the tunings of a layer on all machines.
    #[doc(hidden)]
    pub fn tunings_of(&self, target: Target, layer: &str) -> Vec<Tuned> {
        let all = self.read_all(&prefix(target, layer)).into_iter();
        // Another layer may share the first 16 digits.
        all.filter(|tuned| tuned.layer == layer).collect()
    }

    /// Returns every readable tuning.
    #[doc(hidden)]
    pub fn tunings(&self) -> Vec<Tuned> {
        self.read_all("")
    }

    /// Keeps a tuning, replacing that of the same layer and machine. Returns its file.
    ///
    /// # Errors
    /// [`StoreError`] if the file cannot be written.
    #[doc(hidden)]
    pub fn keep_tuned(&self, tuned: &Tuned) -> Result<PathBuf, StoreError> {
        if let Some(trouble) = self.trouble() {
            return Err(trouble);
        }
        // The layer becomes a part of the file name.
        if !is_hash(&tuned.layer) {
            let reason = "the layer of a tuning is a hash";
            let error = Error::new(ErrorKind::InvalidInput, reason);
            return Err(StoreError::io(
                "write a tuning to",
                &self.tuned_dir(),
                error,
            ));
        }
        let path = self.tuned_dir().join(tuned.file_name());
        let bytes = encode(tuned).map_err(|error| StoreError::io("encode", &path, error.into()))?;
        let check = |back: Vec<u8>| {
            if back == bytes {
                decode(&back).map(drop).map_err(|error| error.to_string())
            } else {
                Err("other bytes".to_string())
            }
        };
        files::write(&self.layout, &path, &bytes, Care::Thorough(&check))?;
        Ok(path)
    }

    /// Checks that a tuning could be kept now; call it before you spend time measuring one.
    ///
    /// # Errors
    /// [`StoreError`] if the directory cannot be written to.
    #[doc(hidden)]
    pub fn can_keep_tunings(&self) -> Result<(), StoreError> {
        if let Some(trouble) = self.trouble() {
            return Err(trouble);
        }
        files::try_write(&self.layout, &self.tuned_dir())
    }

    #[cfg(feature = "packs")]
    pub(crate) fn has_tuned(&self, tuned: &Tuned) -> bool {
        self.tuned(tuned.target, &tuned.layer, &tuned.machine)
            .is_some()
    }

    #[cfg(feature = "packs")]
    pub(crate) fn remove_tuned(&self, tuned: &Tuned) {
        let _ = std::fs::remove_file(self.tuned_dir().join(tuned.file_name()));
    }

    fn off_is_none(&self) -> Option<()> {
        self.trouble().is_none().then_some(())
    }

    fn tuned_dir(&self) -> PathBuf {
        self.layout.tuned()
    }

    fn read_all(&self, prefix: &str) -> Vec<Tuned> {
        let files = self.tuning_files(prefix);
        let all = files.iter().filter_map(|path| self.read_tuned(path));
        all.collect()
    }

    /// Returns the tuning files whose names start with `prefix`, sorted.
    fn tuning_files(&self, prefix: &str) -> Vec<PathBuf> {
        if self.off_is_none().is_none() {
            return Vec::new();
        }
        let entries = std::fs::read_dir(self.tuned_dir()).into_iter().flatten();
        let mut files: Vec<PathBuf> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with(prefix) && name.ends_with(".json")
            })
            .collect();
        files.sort();
        files
    }

    fn read_tuned(&self, path: &Path) -> Option<Tuned> {
        let read = match store::peek(path) {
            Ok(bytes) => decode(&bytes),
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            Err(error) => Err(Unread::Damaged(error.to_string())),
        };
        read.map_err(|reason| pass_over(path, &reason)).ok()
    }
}

pub(crate) fn pass_over(path: &Path, reason: &Unread) {
    let path = path.display();
    match reason {
        Unread::Former => tracing::warn!(%path, %reason, "going on without an old tuning"),
        Unread::Foreign { .. } => {
            tracing::warn!(%path, %reason, "going on without another's tuning");
        }
        Unread::Damaged(_) => tracing::warn!(%path, %reason, "going on without a damaged tuning"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_foreign_tuning_says_whose_it_is() {
        let machine = |threads| TunedMachine {
            name: "A CPU".to_string(),
            threads,
        };
        let target = |name: &str| -> Target { name.parse().unwrap() };
        let own = Tuned {
            target: target("cpu:avx2"),
            layer: "ab12".to_string(),
            machine: machine(2),
            name: "mixtral".to_string(),
            buckets: Vec::new(),
        };
        let said = |name: &str, layer: &str, threads| {
            let reason = own.foreign(target(name), layer, &machine(threads));
            reason.map(|reason| reason.to_string())
        };
        assert_eq!(said("cpu:avx2", "ab12", 2), None);
        for (reason, expected) in [
            (
                said("cpu:avx512", "ab12", 2),
                "it is for cpu:avx2, not for cpu:avx512",
            ),
            (
                said("cpu:avx2", "cd34", 2),
                "it is for layer ab12, not for layer cd34",
            ),
            (
                said("cpu:avx2", "ab12", 3),
                "it is for 2 threads of A CPU, not for 3 threads of A CPU",
            ),
        ] {
            assert_eq!(reason.as_deref(), Some(expected));
        }
    }
}
