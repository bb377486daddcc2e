//! Errors of devices.

use super::{DriverReason, Fault, LaunchReason, LoadReason, UnavailableReason};
use std::fmt;

/// The reason a device operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is no driver, or no device behind it.
    #[error("no `{backend}` device is available: {reason}")]
    Unavailable {
        /// The backend.
        backend: String,
        /// The missing part, and what would help.
        #[source]
        reason: UnavailableReason,
    },
    /// The device refused an artifact.
    #[error("cannot load kernel `{kernel}`: {reason}")]
    Load {
        /// The symbol or name.
        kernel: String,
        /// The difference, or the loader's error.
        #[source]
        reason: LoadReason,
    },
    /// A launch was refused, or a launched kernel failed.
    #[error("launch of kernel `{kernel}` failed: {reason}")]
    Launch {
        /// The symbol.
        kernel: String,
        /// The argument, the limit, or the driver's error.
        #[source]
        reason: LaunchReason,
    },
    /// An earlier kernel has failed, and it is unknown which one.
    #[error(
        "a launched kernel failed: {fault}; it came to light at a later {operation}; {suspects}"
    )]
    Faulted {
        /// The driver's error.
        #[source]
        fault: Fault,
        /// The operation that revealed the failure.
        operation: String,
        /// `one of: `, then the launches since the last synchronization.
        suspects: String,
    },
    /// An earlier failure broke the driver's context.
    #[error(
        "{operation} is not possible: an earlier failure has made the GPU unusable for this process\n\
         the failure: {cause}\n\
         restart the process"
    )]
    Lost {
        /// The operation.
        operation: String,
        /// The earlier failure.
        #[source]
        cause: Box<DeviceError>,
    },
    /// The operation cannot be part of the graph being captured.
    #[error(
        "{attempted} is not possible while graph `{graph}` is being captured: \
         do it before the capture, or after its end"
    )]
    Capturing {
        /// The graph's name.
        graph: String,
        /// The operation: ``the load of kernel `combine` ``.
        attempted: String,
    },
    /// The backend lacks this feature.
    #[error("`{backend}` does not support {asked}")]
    Unsupported {
        /// The backend.
        backend: String,
        /// The feature.
        asked: String,
    },
    /// Memory ran out.
    #[error("out of device memory: {asked} bytes were requested{free}")]
    OutOfMemory {
        /// The requested bytes.
        asked: usize,
        /// The memory that there is.
        free: FreeMemory,
    },
    /// Any other failure of the driver.
    #[error("{operation} failed: {reason}")]
    Driver {
        /// The operation.
        operation: String,
        /// The rule that it breaks, or the driver's error.
        #[source]
        reason: DriverReason,
    },
}

/// The memory left where an allocation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreeMemory {
    /// The device does not say.
    Unknown,
    /// The bytes that are free in all.
    Bytes(usize),
    /// The bytes of the largest free piece.
    LargestGap(u64),
}

impl fmt::Display for FreeMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FreeMemory::Unknown => Ok(()),
            FreeMemory::Bytes(bytes) => write!(f, " ({bytes} bytes are free)"),
            FreeMemory::LargestGap(bytes) => write!(f, "; the largest gap is {bytes} bytes"),
        }
    }
}
