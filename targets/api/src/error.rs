//! Errors of compilers and devices.

/// A compile that did not give an artifact.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// No compiler of this kind is on the machine.
    #[error("no compiler for `{backend}` was found; tried: {tried}\n{advice}")]
    NoCompiler {
        /// The backend.
        backend: String,
        /// Every place that was looked at.
        tried: String,
        /// What to install or set.
        advice: String,
    },
    /// The compiler is there and cannot do this target.
    #[error("{compiler} cannot compile for `{target}`\n{advice}")]
    UnsupportedTarget {
        /// The compiler.
        compiler: String,
        /// The target asked for.
        target: String,
        /// What it can do, or what to install.
        advice: String,
    },
    /// The compiler rejected the text. For emitted kernels this is our bug.
    #[error("{compiler} rejected kernel `{kernel}` for `{target}`:\n{log}")]
    Rejected {
        /// The compiler.
        compiler: String,
        /// The kernel's name.
        kernel: String,
        /// The target.
        target: String,
        /// The compiler's own words.
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
        /// Registers that a thread has, where the binary says so.
        registers: Option<u32>,
        /// Bytes per thread.
        bytes: u32,
    },
    /// The assembler does not do what the kernel's speed rests on: it
    /// serialises the wgmma instructions, so that nothing overlaps with them,
    /// or leaves every warp its registers where they should change hands.
    #[error(
        "kernel `{kernel}` for `{target}` is slower than its text says: {reason}\n\
         wait for products before touching their registers, say in the launch bounds how many \
         blocks there are at least where registers change hands, or allow the loss"
    )]
    PerformanceLoss {
        /// The kernel's name.
        kernel: String,
        /// The target.
        target: String,
        /// The assembler's own words.
        reason: String,
    },
    /// The binary cannot be read back, or is not what the source declares.
    #[error("{compiler} made a bad binary of kernel `{kernel}`: {reason}")]
    BadBinary {
        /// The compiler.
        compiler: String,
        /// The kernel's name.
        kernel: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The compiler could not be run, crashed, or a file was in the way.
    #[error("{compiler} failed on kernel `{kernel}`: {reason}")]
    Failed {
        /// The compiler.
        compiler: String,
        /// The kernel's name.
        kernel: String,
        /// What happened.
        reason: String,
    },
}

/// A device operation that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// No driver, or no device behind it.
    #[error("no `{backend}` device is available: {reason}")]
    Unavailable {
        /// The backend.
        backend: String,
        /// What was tried and what it said.
        reason: String,
    },
    /// The device refused an artifact.
    #[error("cannot load kernel `{kernel}`: {reason}")]
    Load {
        /// Symbol or name.
        kernel: String,
        /// What the loader said.
        reason: String,
    },
    /// A launch was refused, or a launched kernel failed.
    #[error("launch of kernel `{kernel}` failed: {reason}")]
    Launch {
        /// The symbol.
        kernel: String,
        /// What the driver said.
        reason: String,
    },
    /// A kernel that was launched earlier has failed, and it is not known
    /// which.
    #[error("a launched kernel failed: {reason}; {suspects}")]
    Faulted {
        /// What the driver said, and when it came to light.
        reason: String,
        /// `one of: ` the launches since the last synchronise.
        suspects: String,
    },
    /// The driver's context is broken by an earlier failure.
    #[error(
        "{operation} is not possible: the GPU is lost to this process since an earlier failure\n\
         the failure: {cause}\n\
         start the process again"
    )]
    Lost {
        /// What was to be done.
        operation: String,
        /// The failure.
        cause: String,
    },
    /// It cannot be part of the graph that is being captured.
    #[error(
        "{attempted} is not possible while graph `{graph}` is being captured: \
         do it before the capture, or after its end"
    )]
    Capturing {
        /// The graph's name.
        graph: String,
        /// What was attempted: `the load of kernel `combine``.
        attempted: String,
    },
    /// The backend has nothing of the kind.
    #[error("`{backend}` does not support {asked}")]
    Unsupported {
        /// The backend.
        backend: String,
        /// What was asked for.
        asked: String,
    },
    /// Memory ran out.
    #[error("out of device memory: {asked} bytes were asked for{free}")]
    OutOfMemory {
        /// Bytes asked for.
        asked: usize,
        /// ` (n bytes are free)`, or empty.
        free: String,
    },
    /// Anything else the driver said.
    #[error("{operation} failed: {reason}")]
    Driver {
        /// What was being done.
        operation: String,
        /// What the driver said.
        reason: String,
    },
}
