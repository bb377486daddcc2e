//! Plain data that flows down the pipeline: dtypes, targets, sizes, kernel
//! sources and their signatures.
//!
//! Nothing here computes, opens a file or knows a device. `codegen` fills a
//! [`KernelSource`]; a target compiles it and launches it by its
//! [`Entry`] list. Both sides need only this crate.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

mod arch;
mod caches;
mod dtype;
mod size;
mod source;
mod target;

pub use arch::{ArchCaps, CudaArch, MatrixUnit, Mfma, RocmArch, UnitCaps};
pub use caches::CpuCaches;
pub use dtype::DType;
pub use size::Size;
pub use source::{
    Access, Entry, KernelSource, Language, Launch, Param, ParamType, Scalar, Stem, Swizzle,
    TensorMap,
};
pub use target::{CpuIsa, SimArch, Target, TargetError};
