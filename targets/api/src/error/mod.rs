//! Errors of compilers and devices.

mod compile;
mod device;
mod reason;

pub use compile::{BinaryReason, CompileError, CompilerReason, SignatureError};
pub use device::{DeviceError, FreeMemory};
pub use reason::{DriverReason, LaunchReason, LoadReason, UnavailableReason};

use std::error::Error;
use std::ffi::c_int;
use std::fmt;
use std::io::{self, ErrorKind};
use std::sync::Arc;

/// An error of a library or a crate that this one does not know. Two are equal if they say the
/// same.
#[derive(Clone)]
pub struct SharedError(Arc<dyn Error + Send + Sync>);

impl SharedError {
    /// Wraps an error.
    pub fn new(error: impl Error + Send + Sync + 'static) -> SharedError {
        SharedError(Arc::new(error))
    }

    /// Returns the error inside, for a downcast.
    pub fn get(&self) -> &(dyn Error + Send + Sync + 'static) {
        &*self.0
    }
}

impl fmt::Debug for SharedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for SharedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl Error for SharedError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

impl PartialEq for SharedError {
    fn eq(&self, other: &SharedError) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for SharedError {}

/// A failure reported by the operating system.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct SystemError {
    /// The kind of the error.
    pub kind: ErrorKind,
    /// The system's message.
    pub message: Box<str>,
}

impl From<io::Error> for SystemError {
    fn from(error: io::Error) -> SystemError {
        SystemError {
            kind: error.kind(),
            message: error.to_string().into(),
        }
    }
}

/// A driver's error code with its text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{words}")]
pub struct Fault {
    /// The code; CUDA and HIP use the same ones.
    pub code: c_int,
    /// The name and description.
    pub words: String,
}
