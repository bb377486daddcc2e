//! The ROCm target.
//!
//! The crate has two independent halves: [`RocmCompiler`] turns HIP text into a
//! code object and needs no ROCm; [`HipDevice`] loads and launches code objects
//! and needs no compiler. Neither links a vendor library. Compilers run in
//! child processes only, because some abort on targets that they do not know.
//!
//! This crate is an internal part of `moesaic` and changes without notice.

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
