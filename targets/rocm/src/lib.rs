//! The ROCm target.
//!
//! Two halves that never meet: [`RocmCompiler`] turns HIP text into a code
//! object and needs no ROCm, [`HipDevice`] loads code objects and launches
//! them and needs no compiler. Neither links a vendor library, and compilers
//! only ever run in child processes: some abort on targets they do not know.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

mod child;
mod clang;
mod code_object;
mod compiler;
#[cfg(feature = "driver")]
mod device;
mod find;
#[cfg(feature = "driver")]
mod hip;
mod hiprtc;
mod msgpack;
mod tool;

pub use clang::{ClangFacts, ClangTool};
pub use code_object::{CodeObjectError, CodeObjectKernel, read_code_object};
pub use compiler::RocmCompiler;
#[cfg(feature = "driver")]
pub use device::HipDevice;
pub use hiprtc::maybe_run_child;
