//! CPU kernels of instruction sets that this machine lacks, run here: the
//! targets `sim:neon*` and `sim:amx`.
//!
//! A kernel's text is that of `cpu:neon*` or `cpu:amx`, its machine code too: a
//! compiler links it with a launcher of a hundred lines of C to a program.
//! An emulator of user programs runs every instruction of aarch64; a program
//! with tiles runs on this CPU, which must have AVX-512, and answers the signal
//! that each instruction of AMX ends with itself. Memory of the device is one
//! file that programs map, so a launch is a message with addresses and numbers.
//! Every allocation has bytes behind it that nobody may write, and is filled
//! with NaN.
//!
//! | module | what |
//! |---|---|
//! | `compiler`, `launcher.c`, `tiles.c` | text to program |
//! | `device`, `module` | loading and launching |
//! | `machine` | what runs programs: QEMU, or this CPU |
//! | `program` | a process of one and what is said to it |
//! | `memory` | the file, its allocations and their fences |
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

mod compiler;
mod device;
mod machine;
mod memory;
mod module;
mod program;

pub use compiler::EmulatedCompiler;
pub use device::EmulatedDevice;
