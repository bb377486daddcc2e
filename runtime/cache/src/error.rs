//! Errors of the store. A [`StoreError`] never stops a layer.

use moesaic_target::CompileError;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A failure of the store to keep something. Kernels work without it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// There is no usable cache directory.
    #[error("the kernel cache is off: {reason}")]
    Off {
        /// The reason, and the change to make.
        reason: String,
    },
    /// A file operation failed.
    #[error("the kernel cache cannot {action} {}: {source}", path.display())]
    Io {
        /// The attempted action, such as `write`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The bytes read back differ from those written.
    #[error("the kernel cache wrote {} and reads something else: {reason}", path.display())]
    Unfaithful {
        /// The file.
        path: PathBuf,
        /// The difference.
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

/// The reason a kernel is not available.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The store lacks it, and strict mode compiles nothing.
    #[error(
        "kernel `{kernel}` for `{target}` is not in the cache {cache}, and strict mode does not \
         compile\nadd it with: moesaic precompile --spec {spec} --target {target} --cache {cache}"
    )]
    Missing {
        /// The kernel's name.
        kernel: String,
        /// The target.
        target: String,
        /// Your name for the spec.
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
        /// The attempted action.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The pack ends early or is not a pack.
    #[error("pack {} is truncated or damaged: {reason}\nnone of it is used; copy or build it again", path.display())]
    Damaged {
        /// The pack.
        path: PathBuf,
        /// The damage and its place.
        reason: String,
    },
    /// The store could not take a kernel. Those imported before it were removed again.
    #[error("nothing was imported: {0}")]
    Store(#[from] StoreError),
}
