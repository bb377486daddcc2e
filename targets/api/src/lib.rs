//! The interface between moesaic and its targets.
//!
//! Compiling and running are separate: a [`Compiler`] needs a run-time compiler and no driver, a
//! [`Device`] needs a driver and no compiler. Neither sees a layer spec or a template: a
//! [`moesaic_kernel::KernelSource`] goes in, an [`Artifact`] comes out, and its entries are
//! launched. A GPU is a [`StreamDevice`] too; the feature `gpu` builds one on a driver.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

mod args;
mod artifact;
pub mod child;
mod compiler;
mod counters;
mod device;
mod error;
#[cfg(feature = "gpu")]
pub mod gpu;
pub mod scratch;
pub mod script;
mod stream;

pub use args::{ArgBlock, MAP_BYTES, MapBytes, gpu_grid};
pub use artifact::{Artifact, ArtifactReport, KernelReport, ParamSlot};
pub use compiler::{CompileOptions, Compiler};
pub use counters::{GlobalCounts, InstructionCounts, KernelCounters, SharedCounts};
pub use device::{Arg, Buffer, Device, DeviceInfo, FunctionId, LaunchDims, Module, Ptr};
pub use device::{RowCopy, RowSpan};
pub use error::{BinaryReason, CompileError, CompilerReason, SignatureError};
pub use error::{DeviceError, Fault, FreeMemory, SharedError, SystemError};
pub use error::{DriverReason, LaunchReason, LoadReason, UnavailableReason};
pub use scratch::Scratch;
pub use stream::{DeviceCopy, Event, GpuInfo, Graph, HostBuffer, StreamDevice};
