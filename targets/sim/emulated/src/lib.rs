//! CPU kernels of instruction sets that this machine lacks: the targets
//! `sim:neon*` and `sim:amx`.
//!
//! A kernel's text and machine code are those of `cpu:neon*` or `cpu:amx`. A
//! compiler links them with a launcher of a hundred lines of C to a program.
//! QEMU's user emulator runs every instruction of aarch64. A program with tiles
//! runs on this CPU, which must have AVX-512, and its own signal handler
//! answers each AMX instruction. The memory of the device is one file that
//! programs map, so a launch is a message with addresses and numbers. Every
//! allocation is filled with NaN and followed by bytes that nobody may write.
//!
//! | module | contents |
//! |---|---|
//! | `compiler`, `launcher.c`, `tiles.c` | text to program |
//! | `device`, `module` | loading and launching |
//! | `machine` | the host of programs: QEMU, or this CPU |
//! | `program` | the process of a program, and its messages |
//! | `memory` | the file, its allocations and their fences |
//!
//! This crate is an internal part of `moesaic` and changes without notice.

mod compiler;
mod device;
mod machine;
mod memory;
mod module;
mod program;
mod state;

pub use compiler::EmulatedCompiler;
pub use device::EmulatedDevice;
