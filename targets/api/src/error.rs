//! Errors of compilers and devices.

/// The reason a compile gave no artifact.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// This machine has no compiler for the backend.
    #[error("no compiler for `{backend}` was found; tried: {tried}\n{advice}")]
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
        reason: String,
    },
    /// The compiler could not be started or crashed, or a file was in the way.
    #[error("{compiler} failed on kernel `{kernel}`: {reason}")]
    Failed {
        /// The compiler.
        compiler: String,
        /// The kernel's name.
        kernel: String,
        /// The failure.
        reason: String,
    },
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

/// The reason a device operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is no driver, or no device behind it.
    #[error("no `{backend}` device is available: {reason}")]
    Unavailable {
        /// The backend.
        backend: String,
        /// The libraries that were tried, with their errors.
        reason: String,
    },
    /// The device refused an artifact.
    #[error("cannot load kernel `{kernel}`: {reason}")]
    Load {
        /// The symbol or name.
        kernel: String,
        /// The loader's message.
        reason: String,
    },
    /// A launch was refused, or a launched kernel failed.
    #[error("launch of kernel `{kernel}` failed: {reason}")]
    Launch {
        /// The symbol.
        kernel: String,
        /// The driver's message.
        reason: String,
    },
    /// An earlier kernel has failed, and it is unknown which one.
    #[error("a launched kernel failed: {reason}; {suspects}")]
    Faulted {
        /// The driver's message, and the operation that revealed the failure.
        reason: String,
        /// `one of: `, then the launches since the last synchronization.
        suspects: String,
    },
    /// An earlier failure broke the driver's context.
    #[error(
        "{operation} is not possible: an earlier failure has made the GPU unusable for this process\n\
         the failure: {cause}\n\
         restart the process"
    )]
    Lost {
        /// The operation.
        operation: String,
        /// The earlier failure.
        cause: String,
    },
    /// The operation cannot be part of the graph being captured.
    #[error(
        "{attempted} is not possible while graph `{graph}` is being captured: \
         do it before the capture, or after its end"
    )]
    Capturing {
        /// The graph's name.
        graph: String,
        /// The operation: `the load of kernel `combine``.
        attempted: String,
    },
    /// The backend lacks this feature.
    #[error("`{backend}` does not support {asked}")]
    Unsupported {
        /// The backend.
        backend: String,
        /// The feature.
        asked: String,
    },
    /// Memory ran out.
    #[error("out of device memory: {asked} bytes were requested{free}")]
    OutOfMemory {
        /// The requested bytes.
        asked: usize,
        /// ` (n bytes are free)`, or empty.
        free: String,
    },
    /// Any other failure of the driver.
    #[error("{operation} failed: {reason}")]
    Driver {
        /// The operation.
        operation: String,
        /// The driver's message.
        reason: String,
    },
}
