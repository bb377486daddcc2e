//! CPU kernels of aarch64, run on this machine by QEMU: the targets
//! `sim:neon*`.
//!
//! A kernel's text is that of `cpu:neon*`, its machine code too: a compiler for
//! aarch64 links it with a launcher of a hundred lines of C to a program, and
//! an emulator of user programs runs every instruction of it. Memory of the
//! device is one file that the emulator maps, so a launch is a message with
//! addresses and numbers. Every allocation has bytes behind it that nobody may
//! write, and is filled with NaN.
//!
//! | module | what |
//! |---|---|
//! | `compiler`, `launcher.c` | text to program |
//! | `device`, `module` | loading and launching |
//! | `emulator` | finding QEMU, a process of it and what is said to it |
//! | `memory` | the file, its allocations and their fences |

mod compiler;
mod device;
mod emulator;
mod memory;
mod module;

pub use compiler::QemuCompiler;
pub use device::QemuDevice;
