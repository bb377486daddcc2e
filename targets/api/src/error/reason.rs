//! The reasons inside a [`DeviceError`](super::DeviceError).

use super::{Fault, SharedError, SignatureError, SystemError};
#[cfg(feature = "gpu")]
use crate::gpu::{LaunchShape, VendorError};
use moesaic_kernel::{ParamType, Target};
use thiserror::Error;

/// The reason there is no device.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum UnavailableReason {
    /// This build lacks the backend.
    #[error(
        "moesaic was built without its feature `{feature}`; add it to the dependency in \
         Cargo.toml: features = [\"{feature}\"]"
    )]
    NotBuilt {
        /// The feature.
        feature: String,
    },
    /// The driver's library is missing, or too old.
    #[error("{library}; {advice}")]
    NoDriver {
        /// The libraries that were tried, with their errors.
        #[source]
        library: SharedError,
        /// The software to install.
        advice: &'static str,
    },
    /// The driver does not answer.
    #[error(transparent)]
    Driver(#[from] Fault),
    /// There are fewer GPUs.
    #[error("GPU {ordinal} was asked for; the {driver} has {count}, counted from 0")]
    NoSuchGpu {
        /// The GPU that was asked for.
        ordinal: usize,
        /// The number of GPUs.
        count: usize,
        /// The library that counts them: `driver`, `runtime`.
        driver: &'static str,
    },
    /// No target fits the GPU.
    #[error("{name} {architecture}, which is not supported")]
    UnknownGpu {
        /// The GPU's name.
        name: String,
        /// Its architecture: `has compute capability 5.0`.
        architecture: String,
    },
    /// The device runs code of another target.
    #[error("{device} runs `{own}`, not `{asked}`")]
    OtherTarget {
        /// The device's name.
        device: String,
        /// The target that it runs.
        own: Target,
        /// The target that was asked for.
        asked: Target,
    },
    /// The operating system refused.
    #[error("{attempted}: {source}")]
    System {
        /// The attempt: `threads cannot be pinned`.
        attempted: String,
        /// The system's error.
        source: SystemError,
    },
    /// A simulator lacks the program or the CPU that it runs on.
    #[error("{0}")]
    Simulator(#[source] SharedError),
}

/// The reason a device refuses an artifact.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LoadReason {
    /// The bytes are not a binary of this device.
    #[error("{0}")]
    Binary(#[source] SharedError),
    /// The binary's kernels are not those that the source declares.
    #[error(transparent)]
    Signature(#[from] SignatureError),
    /// The kernel's name cannot be given to a driver.
    #[error("its name holds a NUL")]
    NulInName,
    /// There is no place for the file.
    #[error("no place for it: {0}")]
    NoPlace(#[source] SystemError),
    /// The driver does not find the kernel, or cannot describe it.
    #[error(transparent)]
    Driver(#[from] Fault),
    /// The driver refuses the binary.
    #[error(
        "{fault}; it was compiled by {compiler}{}",
        driver.as_ref().map_or(String::new(), |driver| format!(", and {driver}"))
    )]
    Refused {
        /// The driver's error.
        #[source]
        fault: Fault,
        /// The compiler of the binary.
        compiler: String,
        /// The driver's version: `the driver is for CUDA 12.4`.
        driver: Option<String>,
    },
    /// The kernel needs more shared memory than a block can have.
    #[error(
        "it needs {} bytes of shared memory per block ({dynamic} dynamic, {fixed} static), \
         {device} has {most}: choose a smaller tile or fewer stages",
        u64::from(*dynamic) + u64::from(*fixed)
    )]
    SharedMemory {
        /// Dynamic bytes of a launch.
        dynamic: u32,
        /// Static bytes.
        fixed: u32,
        /// The device's name.
        device: String,
        /// Bytes per block that the device has.
        most: u32,
    },
    /// The vendor's rules forbid it.
    #[doc(hidden)]
    #[cfg(feature = "gpu")]
    #[error(transparent)]
    Vendor(VendorError),
}

// Written out, because `#[from]` would put it on the pages of users, who never see a vendor's error.
#[cfg(feature = "gpu")]
#[doc(hidden)]
impl From<VendorError> for LoadReason {
    fn from(error: VendorError) -> LoadReason {
        LoadReason::Vendor(error)
    }
}

/// The reason a launch was refused, or a kernel failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LaunchReason {
    /// The number of arguments is wrong.
    #[error("it takes {expected} arguments and got {found}")]
    ArgumentCount {
        /// The kernel's parameters.
        expected: usize,
        /// The arguments of the call.
        found: usize,
    },
    /// An argument is of another kind than its parameter.
    #[error("argument {argument} is {found} and must be {expected:?}")]
    Argument {
        /// The parameter's name in backticks, or its number.
        argument: String,
        /// The value of the call.
        found: String,
        /// The parameter's type.
        #[doc(hidden)]
        expected: ParamType,
    },
    /// The token count is negative.
    #[error("{0} tokens")]
    Tokens(i64),
    /// The grid has too many blocks.
    #[error(
        "a grid of {} x {} blocks is too large{}", grid[0], grid[1],
        most.map_or(String::new(), |[x, y]| format!("; the most are {x} x {y}"))
    )]
    LargeGrid {
        /// Blocks in x and y.
        grid: [u64; 2],
        /// The most that there can be, if each dimension has a limit.
        most: Option<[u64; 2]>,
    },
    /// The module does not have the kernel.
    #[error("it was not loaded; loaded are: {}", known.join(", "))]
    NotLoaded {
        /// The kernels of the module.
        known: Vec<String>,
    },
    /// The device has no tensor maps.
    #[error("this device has no tensor maps")]
    NoTensorMaps,
    /// The launch asks for more dynamic shared memory than the kernel was loaded for.
    #[error("it asks for {asked} bytes of dynamic shared memory, and was loaded for {allowed}")]
    SharedMemory {
        /// Bytes of the launch.
        asked: u32,
        /// Bytes allowed.
        allowed: u32,
    },
    /// The driver refuses the launch.
    #[cfg(feature = "gpu")]
    #[error("{fault}; {shape}")]
    Driver {
        /// The driver's error.
        #[source]
        fault: Fault,
        /// The launch.
        #[doc(hidden)]
        shape: LaunchShape,
    },
    /// The kernel failed while it ran.
    #[cfg(feature = "gpu")]
    #[error("{fault}; it came to light at a later {operation}; {shape}")]
    Failed {
        /// The driver's error.
        #[source]
        fault: Fault,
        /// The operation that revealed the failure.
        operation: String,
        /// The launch.
        #[doc(hidden)]
        shape: LaunchShape,
    },
    /// The vendor's rules forbid it.
    #[doc(hidden)]
    #[cfg(feature = "gpu")]
    #[error(transparent)]
    Vendor(VendorError),
    /// A simulator refuses the launch, or has found a defect of the kernel.
    #[error("{0}")]
    Simulator(#[source] SharedError),
}

// As for [`LoadReason`].
#[cfg(feature = "gpu")]
#[doc(hidden)]
impl From<VendorError> for LaunchReason {
    fn from(error: VendorError) -> LaunchReason {
        LaunchReason::Vendor(error)
    }
}

/// The reason an operation failed that is neither a load nor a launch.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DriverReason {
    /// The driver's error.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// The driver's error, after which it refuses everything.
    #[error("{0}; the GPU is lost to this process")]
    Lost(#[source] Fault),
    /// The operating system's error.
    #[error(transparent)]
    System(#[from] SystemError),
    /// The range ends behind the buffer.
    #[error("the buffer holds {bytes} bytes")]
    OutOfRange {
        /// Bytes of the buffer.
        bytes: usize,
    },
    /// The buffer is of another device.
    #[error("it is not of this device")]
    ForeignBuffer,
    /// The rows of a copy overlap.
    #[error("rows lie within each other")]
    Overlap,
    /// The rows of a copy have more bytes than can be counted.
    #[error("there are too many")]
    TooManyRows,
    /// A capture ends on another stream than it began on.
    #[error("it was begun on another stream and must end there")]
    OtherStream,
    /// No capture is there to end.
    #[error("no graph is being captured on this stream")]
    NoCapture,
    /// The event is a part of a graph.
    #[error(
        "the event is a part of graph `{graph}` and never comes to pass by itself; record events \
         around the graph's launch"
    )]
    CapturedEvent {
        /// The graph's name.
        graph: String,
    },
    /// The driver allocated memory without an address.
    #[error("the driver gave no address")]
    NoAddress,
    /// The operation is about a kernel that cannot be used.
    #[error(transparent)]
    Kernel(#[from] LaunchReason),
    /// The binary's kernels are not those that the source declares.
    #[error(transparent)]
    Signature(#[from] SignatureError),
}
