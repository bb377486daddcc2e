//! A machine that runs PTX, and says what is wrong with it.
//!
//! [`PtxCompiler`] turns CUDA C++ into PTX with NVRTC; [`PtxDevice`] runs it,
//! a warp at a time, with shared memory, barriers, copy and matrix engines,
//! and checks every step: bounds, alignment, races, fences, what is read
//! before it is written. A defect is a [`Finding`] with kernel, block, thread
//! and line, and the error of the launch.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

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
mod tensor_map;
mod text;

pub use artifact::artifact_of_ptx;
pub use compiler::PtxCompiler;
pub use device::{Checks, PtxDevice, PtxOptions};
pub use error::PtxError;
pub use finding::{Finding, FindingKind};
