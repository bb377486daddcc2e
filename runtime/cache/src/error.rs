//! Errors of the store. Those of [`StoreError`] never stop a layer.

use moesaic_target::CompileError;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The store could not keep something. Kernels work without it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// There is no usable cache directory.
    #[error("the kernel cache is off: {reason}")]
    Off {
        /// Why, and what to change.
        reason: String,
    },
    /// A file operation failed.
    #[error("the kernel cache cannot {action} {}: {source}", path.display())]
    Io {
        /// What was being done: `write`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// What was written is not what is read.
    #[error("the kernel cache wrote {} and reads something else: {reason}", path.display())]
    Unfaithful {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

impl StoreError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> StoreError {
        StoreError::Io {
            action,
            path: path.to_path_buf(),
            source,
        }
    }
}

/// A kernel that could not be had.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// It is not in the store, and strict mode compiles nothing.
    #[error(
        "kernel `{kernel}` for `{target}` is not in the cache {cache}, and strict mode does not \
         compile\nadd it with: moesaic precompile --spec {spec} --target {target} --cache {cache}"
    )]
    Missing {
        /// The kernel's name.
        kernel: String,
        /// The target.
        target: String,
        /// How the spec is called.
        spec: String,
        /// The cache directory.
        cache: String,
    },
    /// It does not compile.
    #[error(transparent)]
    Compile(Arc<CompileError>),
}

/// A pack that could not be written or read.
#[cfg(feature = "packs")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// A file operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was being done.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The pack ends early or is not a pack.
    #[error("pack {} is truncated or damaged: {reason}\nnothing was imported; copy or build it again", path.display())]
    Damaged {
        /// The pack.
        path: PathBuf,
        /// What is wrong, and where.
        reason: String,
    },
    /// The store could not take a kernel; those before it were taken back.
    #[error("nothing was imported: {0}")]
    Store(#[from] StoreError),
}
