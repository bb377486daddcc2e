//! The bytes of a `.kernel` file.
//!
//! ```text
//!  0   8  magic "moesaic\n"
//!  8   4  format version
//! 12   4  length of the header
//! 16   8  length of the binary
//! 24  32  SHA-256 of the key, bytes 0..24, the header and the binary
//! 56      header (JSON), then binary
//! ```
//!
//! Integers are little-endian. The hash covers the key but the file does not contain it, so an
//! entry under a wrong name is detected like a flipped bit.

use crate::version::FORMAT_VERSION;
use crate::{KernelKey, hash};
use moesaic_kernel::{Entry, KernelSource, Language, Stem, Target};
use moesaic_target::{Artifact, ArtifactReport};
use serde::{Deserialize, Serialize};

/// An upper bound far above any kernel. A longer file is not one of ours, and is never read into
/// memory.
pub(crate) const LARGEST: u64 = 256 << 20;

const MAGIC: &[u8; 8] = b"moesaic\n";
const PREFIX: usize = 56;

/// The store's knowledge of a kernel besides its binary.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelInfo {
    /// The kernel's name.
    pub name: String,
    /// The operator.
    #[doc(hidden)]
    pub stem: Stem,
    /// The target.
    pub target: Target,
    /// The language of its source.
    #[doc(hidden)]
    pub language: Language,
    /// The functions that can be launched.
    #[doc(hidden)]
    pub entries: Vec<Entry>,
    /// Facts about the binary.
    pub report: ArtifactReport,
    /// SHA-256 of the source, in hex.
    pub source_hash: String,
    /// The layer for which it was compiled. Layers of the same shape share kernels, so others may
    /// use it too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<String>,
}

/// A kernel from a store.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredKernel {
    /// Its description.
    pub info: KernelInfo,
    /// The binary that a device loads.
    pub artifact: Artifact,
}

impl StoredKernel {
    /// Returns a fresh artifact in the form in which the store would return it.
    pub fn new(source: &KernelSource, artifact: Artifact) -> StoredKernel {
        let info = KernelInfo {
            name: source.name.clone(),
            stem: source.stem,
            target: source.target,
            language: source.language,
            entries: source.entries.clone(),
            report: artifact.report.clone(),
            source_hash: hash_source(&source.text),
            layer: None,
        };
        StoredKernel { info, artifact }
    }

    /// Returns the same kernel with the name of its layer.
    #[must_use]
    pub fn of_layer(mut self, layer: Option<&str>) -> StoredKernel {
        self.info.layer = layer.map(str::to_string);
        self
    }
}

/// Hashes a source as [`KernelInfo::source_hash`] holds it.
pub fn hash_source(text: &str) -> String {
    hash::to_hex(&hash::of([text.as_bytes()]))
}

/// Returns true if a kernel was made from exactly this text.
pub(crate) fn is_source_of(text: &[u8], info: &KernelInfo) -> bool {
    hash::to_hex(&hash::of([text])) == info.source_hash
}

/// Returns the bytes of a kernel's file.
pub(crate) fn encode(key: &KernelKey, stored: &StoredKernel) -> Result<Vec<u8>, serde_json::Error> {
    let header = serde_json::to_vec(&stored.info)?;
    let binary = &stored.artifact.binary;
    let mut file = Vec::with_capacity(PREFIX + header.len() + binary.len());
    file.extend_from_slice(MAGIC);
    file.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
    file.extend_from_slice(&(header.len() as u32).to_le_bytes());
    file.extend_from_slice(&(binary.len() as u64).to_le_bytes());
    let sum = checksum(key, &file, &[&header, binary]);
    file.extend_from_slice(&sum);
    file.extend_from_slice(&header);
    file.extend_from_slice(binary);
    Ok(file)
}

/// Reads the kernel in a file, or returns the damage.
pub(crate) fn decode(key: &KernelKey, mut file: Vec<u8>) -> Result<StoredKernel, String> {
    let (header, _) = lengths(&file)?;
    let (prefix, body) = file.split_at(PREFIX);
    if checksum(key, &prefix[..24], &[body]) != prefix[24..] {
        return Err("its contents do not match its hash".to_string());
    }
    let binary = file.split_off(PREFIX + header);
    let info: KernelInfo = serde_json::from_slice(&file[PREFIX..])
        .map_err(|error| format!("its header cannot be read: {error}"))?;
    let report = info.report.clone();
    Ok(StoredKernel {
        info,
        artifact: Artifact { binary, report },
    })
}

/// Returns the lengths of header and binary, if the file is whole and of this version.
fn lengths(file: &[u8]) -> Result<(usize, usize), String> {
    let Some(prefix) = file.first_chunk::<PREFIX>() else {
        return Err(format!("it has only {} bytes", file.len()));
    };
    if prefix[..8] != *MAGIC {
        return Err("it is not a kernel file".to_string());
    }
    let version = u32::from_le_bytes(field(prefix, 8));
    if version != FORMAT_VERSION {
        return Err(format!(
            "its format version is {version}, not {FORMAT_VERSION}"
        ));
    }
    let header = u64::from(u32::from_le_bytes(field(prefix, 12)));
    let binary = u64::from_le_bytes(field(prefix, 16));
    let whole = (PREFIX as u64 + header).checked_add(binary);
    if whole == Some(file.len() as u64) {
        Ok((header as usize, binary as usize))
    } else {
        Err(format!("it has {} bytes and declares others", file.len()))
    }
}

fn field<const N: usize>(prefix: &[u8; PREFIX], at: usize) -> [u8; N] {
    std::array::from_fn(|i| prefix[at + i])
}

fn checksum(key: &KernelKey, prefix: &[u8], rest: &[&[u8]]) -> [u8; 32] {
    let start = [key.bytes(), prefix];
    hash::of(start.into_iter().chain(rest.iter().copied()))
}
