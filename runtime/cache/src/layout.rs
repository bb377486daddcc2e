//! The paths of the store, and the recognition of its own files.

use crate::{FORMAT_VERSION, KernelKey};
use moesaic_kernel::Language;
use std::fs::{self, Metadata};
use std::path::{Path, PathBuf};

/// Prefix of files being written. They get their final name when they are whole.
pub(crate) const TEMPORARY: &str = ".tmp-";

pub(crate) const LANGUAGES: [Language; 3] = [Language::C, Language::Cuda, Language::Hip];

/// The paths of one format version inside a cache directory. Each version has its own directory and
/// never touches another's.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    cache: PathBuf,
    version: PathBuf,
}

/// A file that belongs to the store.
pub(crate) struct Found {
    pub(crate) path: PathBuf,
    pub(crate) kind: Kind,
    pub(crate) meta: Metadata,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Kernel(KernelKey),
    Source(KernelKey),
    Lock,
    Temporary,
}

impl Layout {
    pub(crate) fn new(cache: PathBuf) -> Layout {
        let version = cache.join(format!("v{FORMAT_VERSION}"));
        Layout { cache, version }
    }

    /// Returns the directory that the user configured.
    pub(crate) fn cache(&self) -> &Path {
        &self.cache
    }

    /// Returns the directory of this format version.
    pub(crate) fn version(&self) -> &Path {
        &self.version
    }

    pub(crate) fn kernel(&self, key: &KernelKey) -> PathBuf {
        self.file(key, "kernel")
    }

    pub(crate) fn source(&self, key: &KernelKey, language: Language) -> PathBuf {
        self.file(key, language.extension())
    }

    /// Returns the path of a key's file. Subdirectories by the key's first digits keep directories
    /// short.
    fn file(&self, key: &KernelKey, extension: &str) -> PathBuf {
        let hex = key.hex();
        self.version
            .join(&hex[..2])
            .join(format!("{hex}.{extension}"))
    }

    pub(crate) fn lock(&self, key: &KernelKey) -> PathBuf {
        self.version.join("locks").join(format!("{key}.lock"))
    }

    pub(crate) fn facts(&self) -> PathBuf {
        self.version.join("facts")
    }

    pub(crate) fn tuned(&self) -> PathBuf {
        self.version.join("tuned")
    }

    /// Returns every file of the store, in the order of names. Other files in the directory are
    /// left out, so nobody removes them.
    pub(crate) fn scan(&self) -> Vec<Found> {
        let mut files: Vec<Found> = children(&self.version)
            .iter()
            .flat_map(|dir| children(dir))
            .filter_map(found)
            .collect();
        files.sort_by(|a, b| a.path.cmp(&b.path));
        files
    }
}

fn children(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect()
}

fn found(path: PathBuf) -> Option<Found> {
    let kind = kind(&path)?;
    // A directory under a kernel's name counts as a damaged entry, because only damage can put one
    // there.
    let own = |meta: &Metadata| meta.is_file() || meta.is_dir() && matches!(kind, Kind::Kernel(_));
    let meta = path.symlink_metadata().ok().filter(own)?;
    Some(Found { path, kind, meta })
}

fn kind(path: &Path) -> Option<Kind> {
    let name = path.file_name()?.to_str()?;
    let dir = path.parent()?.file_name()?.to_str()?;
    if name.starts_with(TEMPORARY) {
        return Some(Kind::Temporary);
    }
    let (hex, extension) = name.split_once('.')?;
    let key: KernelKey = hex.parse().ok()?;
    match extension {
        "lock" if dir == "locks" => Some(Kind::Lock),
        _ if dir != &hex[..2] => None,
        "kernel" => Some(Kind::Kernel(key)),
        _ => is_language(extension).then_some(Kind::Source(key)),
    }
}

pub(crate) fn is_language(extension: &str) -> bool {
    LANGUAGES
        .iter()
        .any(|language| language.extension() == extension)
}
