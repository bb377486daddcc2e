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
mod buffer;
pub mod c_compiler;
pub mod child;
mod compiler;
mod counters;
mod device;
mod error;
#[cfg(feature = "gpu")]
pub mod gpu;
mod launch;
pub mod scratch;
pub mod script;
mod stream;

pub use args::{ArgBlock, gpu_grid};
pub use artifact::{Artifact, ArtifactReport, KernelReport, ParamSlot};
pub use buffer::{Buffer, DeviceCopy, HostBuffer, RowCopy, RowSpan};
pub use compiler::{CompileOptions, Compiler};
pub use counters::{GlobalCounts, InstructionCounts, KernelCounters, SharedCounts};
pub use device::{Device, DeviceInfo, FunctionId, Module, StreamDevice};
pub use error::{BinaryReason, CompileError, CompilerReason, SignatureError};
pub use error::{DeviceError, Fault, FreeMemory, SharedError, SystemError};
pub use error::{DriverReason, LaunchReason, LoadReason, UnavailableReason};
pub use launch::{Arg, LaunchDims, MAP_BYTES, MapBytes, Ptr};
pub use scratch::Scratch;
pub use stream::{Event, GpuInfo, Graph};
