//! A machine that runs PTX and reports the defects of a kernel.
//!
//! [`PtxCompiler`] turns CUDA C++ into PTX with NVRTC. [`PtxDevice`] runs the
//! PTX, a warp at a time, with shared memory, barriers, TMA and tensor cores,
//! and checks every step: bounds, alignment, races, fences, reads of unwritten
//! memory. A launch with a defect fails with a [`Finding`], which names kernel,
//! block, thread and line.
//!
//! This crate is an internal part of `moesaic` and changes without notice.

mod artifact;
mod code;
mod compiler;
mod device;
mod error;
mod finding;
mod launch;
mod machine;
mod memory;
mod report;
mod state;
mod tensor_map;
mod text;

pub use artifact::artifact_of_ptx;
pub use compiler::PtxCompiler;
pub use device::PtxDevice;
pub use error::PtxError;
pub use finding::{Finding, FindingKind};
pub use state::{CheckSet, PtxOptions};
