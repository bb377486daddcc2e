//! GPU kernels as host C++, a fiber for each thread: the target `sim:gfx*`.
//!
//! The C++ compiler of this machine compiles the HIP text of a kernel over
//! `prelude/sim` with the instrumentation of its sanitizers, whose libraries
//! are not linked. So every access of memory calls this crate, which knows
//! every allocation, the last writer of each element, and the barriers between.
//! The crate finds errors by the behaviour of a kernel, not by what happens to
//! break: nothing depends on guard pages or signals.
//!
//! | module | contents |
//! |---|---|
//! | `compiler`, `tool` | text to shared object |
//! | `device`, `module` | loading, launching, blocks over cores |
//! | `worker`, `block`, `switch`, `stacks` | the threads of a block as fibers |
//! | `machine`, `product` | functions that the text calls: barriers,
//! collectives, matrix products |
//! | `memory`, `region`, `shared`, `stamp` | watching memory |
//! | `fault`, `words`, `image`, `lines` | errors, with their names and lines |
//!
//! This crate is an internal part of `moesaic` and changes without notice.

mod block;
mod compiler;
mod device;
mod error;
mod fault;
mod image;
mod lines;
mod machine;
mod memory;
mod module;
mod product;
mod region;
mod shared;
mod stacks;
mod stamp;
mod state;
mod switch;
mod tool;
mod words;
mod worker;

pub use block::ThreadOrder;
pub use compiler::FiberCompiler;
pub use device::{FiberDevice, FiberOptions};
