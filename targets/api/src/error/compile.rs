//! Errors of compilers.

use super::{SharedError, SystemError};
use std::path::PathBuf;
use std::process::ExitStatus;

/// The reason a compile gave no artifact.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// This machine has no compiler for the backend.
    #[error("no compiler for `{backend}` was found\n{advice}\ntried: {tried}")]
    NoCompiler {
        /// The backend.
        backend: String,
        /// Every place that was searched.
        tried: String,
        /// The package to install, or the variable to set.
        advice: String,
    },
    /// The compiler does not support the target.
    #[error("{compiler} cannot compile for `{target}`\n{advice}")]
    UnsupportedTarget {
        /// The compiler.
        compiler: String,
        /// The target asked for.
        target: String,
        /// The supported targets, or the package to install.
        advice: String,
    },
    /// The compiler rejected the text. For emitted kernels this is a bug in moesaic.
    #[error("{compiler} rejected kernel `{kernel}` for `{target}`:\n{log}")]
    Rejected {
        /// The compiler.
        compiler: String,
        /// The kernel's name.
        kernel: String,
        /// The target.
        target: String,
        /// The compiler's own message.
        log: String,
    },
    /// The kernel spills registers to local memory.
    #[error(
        "kernel `{kernel}` for `{target}` does not fit its {}registers: \
         {bytes} bytes per thread are spilled to memory\n\
         kernels of a spec are meant to fit: please report it with the spec; \
         in a kernel of your own take a smaller tile",
        .registers.map(|count| format!("{count} ")).unwrap_or_default()
    )]
    Spills {
        /// The symbol of the entry, or of a function that was not inlined.
        kernel: String,
        /// The target.
        target: String,
        /// Registers per thread, if the binary tells.
        registers: Option<u32>,
        /// Bytes per thread.
        bytes: u32,
    },
    /// The assembler gives up an optimization that the kernel's speed depends on: it serializes the
    /// wgmma instructions, so nothing overlaps with them, or it ignores `setmaxnreg`, so registers
    /// do not move between warps.
    #[error(
        "kernel `{kernel}` for `{target}` runs slower than it should: {reason}\n\
         wait for products before touching their registers, say in the launch bounds how many \
         blocks there are at least where registers change hands, or allow the loss"
    )]
    PerformanceLoss {
        /// The kernel's name.
        kernel: String,
        /// The target.
        target: String,
        /// The assembler's own message.
        reason: String,
    },
    /// The binary cannot be read back, or differs from the source's declarations.
    #[error("{compiler} made a bad binary of kernel `{kernel}`: {reason}")]
    BadBinary {
        /// The compiler.
        compiler: String,
        /// The kernel's name.
        kernel: String,
        /// The difference.
        #[source]
        reason: BinaryReason,
    },
    /// The compiler could not be started or crashed, or a file was in the way.
    #[error("{compiler} failed on kernel `{kernel}`: {reason}")]
    Failed {
        /// The compiler.
        compiler: String,
        /// The kernel's name.
        kernel: String,
        /// The failure.
        #[source]
        reason: CompilerReason,
    },
}

/// The reason a compiler's binary is of no use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BinaryReason {
    /// The file is not a binary of the target, or its notes cannot be read.
    #[error("{0}")]
    Unreadable(#[source] SharedError),
    /// Its kernels are not those that the source declares.
    #[error(transparent)]
    Signature(#[from] SignatureError),
    /// A shared object does not export a kernel.
    #[error("it does not export `{symbol}`; a kernel must not be `static`")]
    NotExported {
        /// The symbol of the entry.
        symbol: String,
    },
    /// A kernel returns and does nothing else.
    #[error(
        "`{symbol}` only returns: the compiler left out what it does; use another compiler by \
         MOESAIC_CC, and please report this one"
    )]
    Empty {
        /// The symbol of the entry.
        symbol: String,
    },
    /// A kernel was compiled for waves of another size.
    #[error("`{symbol}` has waves of {found} lanes, moesaic emits for {expected} on {arch}")]
    Wave {
        /// The symbol of the entry.
        symbol: String,
        /// Lanes per wave in the binary.
        found: u32,
        /// Lanes per wave of the architecture.
        expected: u32,
        /// The architecture.
        arch: &'static str,
    },
}

/// The reason a compiler failed without judging the kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CompilerReason {
    /// The program cannot be started.
    #[error("it cannot be run: {0}")]
    NotStarted(#[source] SystemError),
    /// A file of the compile cannot be written.
    #[error(
        "{attempted} in {} failed: {source}\n\
         set TMPDIR to a directory that is writable and has room", folder.display()
    )]
    NoFile {
        /// The attempt: `writing the source`.
        attempted: &'static str,
        /// The directory.
        folder: PathBuf,
        /// The system's error.
        source: SystemError,
    },
    /// The compiler ran out of disk or memory.
    #[error(
        "no room for its files; free some space or memory, or set TMPDIR to a directory with room\n\
         {log}"
    )]
    NoRoom {
        /// The compiler's own message.
        log: String,
    },
    /// The compiler crashed or was killed.
    #[error("{how}\n{log}")]
    Crashed {
        /// The end: `it was killed by signal 9`.
        how: String,
        /// The compiler's own message.
        log: String,
    },
    /// The program failed and said nothing.
    #[error(
        "it ended with {status} and said nothing; is that a C compiler? MOESAIC_CC, then CC, name \
         another"
    )]
    Silent {
        /// The status.
        status: ExitStatus,
    },
    /// The compiler reported success, and its binary cannot be read.
    #[error("it reported success and left no binary: {0}")]
    NoBinary(#[source] SystemError),
    /// The compiler's library or its child process failed.
    #[error("{0}")]
    Other(#[source] SharedError),
}

/// A binary whose kernels are not those that its source declares.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SignatureError {
    /// The binary lacks a kernel.
    #[error("it holds no kernel `{symbol}`")]
    Missing {
        /// The symbol of the entry.
        symbol: String,
    },
    /// A kernel has another signature than its entry.
    #[error("{disagreement}")]
    Disagrees {
        /// The symbol of the entry.
        symbol: String,
        /// The difference, as [`KernelReport::disagreement`](crate::KernelReport::disagreement)
        /// describes it.
        disagreement: String,
    },
}
