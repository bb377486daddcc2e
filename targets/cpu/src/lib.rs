//! The CPU target: the system C compiler, dlopen, threads that wait for launches.
//!
//! A kernel is C11 with GNU vector extensions and without headers. Each of its
//! entries is a function
//!
//! ```c
//! void SYMBOL(void *const *args, int64_t first, int64_t last, int64_t grid_x);
//! ```
//!
//! where `args[i]` points to the value of the i-th argument (a pointer,
//! `int64_t` or `float`, as in CUDA's `kernelParams`) and the call runs the
//! blocks `first <= b < last` of the linear grid, `b = y * grid_x + x`. Blocks
//! must be independent, because the machine determines how they are divided
//! into calls.
//!
//! [`CpuCompiler`] compiles, [`CpuDevice`] runs, and [`limits`] measures the
//! best rates of the machine.
//!
//! This crate is an internal part of `moesaic` and changes without notice.

mod affinity;
mod caches;
mod compiler;
mod device;
mod driver;
mod executor;
mod find;
mod flags;
mod identity;
mod isa;
mod lanes;
mod library;
pub mod limits;
mod memory;
mod module;
mod nodes;
mod pool;
mod report;
mod scratch;
mod shared;

pub use affinity::processors;
pub use caches::{host_caches, read_caches};
pub use compiler::CpuCompiler;
pub use device::CpuDevice;
pub use flags::compile_flags;
pub use identity::Identity;
pub use isa::{host_isa, host_runs};
pub use library::{LoadError, LoadedLibrary, load as load_shared_object};
pub use nodes::{Nodes, host_nodes, numbered_nodes, read_nodes};
