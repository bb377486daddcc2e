//! GPU kernels as host C++, a fiber for each thread: the target `sim:gfx*`.
//!
//! The HIP text of a kernel over `prelude/sim` is compiled by the C++ compiler
//! of this machine with the instrumentation of its sanitizers, whose libraries
//! are not linked: every access of memory calls this crate, which knows every
//! allocation, who wrote each element last and which barriers lie between. So
//! errors are found by what a kernel does, not by what happens to break:
//! nothing here depends on guard pages or signals.
//!
//! | module | what |
//! |---|---|
//! | `compiler`, `tool` | text to shared object |
//! | `device`, `module` | loading, launching, blocks over cores |
//! | `worker`, `block`, `switch`, `stacks` | the threads of a block as fibers |
//! | `machine`, `product` | what the text calls: barriers, collectives, matrix products |
//! | `memory`, `region`, `shared`, `stamp` | watching memory |
//! | `fault`, `words`, `image`, `lines` | errors, and their names and lines |
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

mod block;
mod compiler;
mod device;
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
mod switch;
mod tool;
mod words;
mod worker;

pub use block::Order;
pub use compiler::FiberCompiler;
pub use device::{FiberDevice, FiberOptions};
