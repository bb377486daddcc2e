//! The interface of compilers, from kernel source to artifact.

use crate::{Artifact, CompileError};
use moesaic_kernel::{KernelSource, Target};
use std::fmt;

/// Options of a compile besides the source.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CompileOptions {
    /// Accept kernels that spill registers to local memory. Otherwise a spill is a
    /// [`CompileError::Spills`].
    pub allow_spills: bool,
    /// Accept kernels whose wgmma instructions the assembler serializes, or whose `setmaxnreg` it
    /// ignores. Their results are right, but they run several times slower than they should.
    /// Otherwise they are a [`CompileError::PerformanceLoss`].
    pub allow_performance_loss: bool,
}

/// A run-time compiler for one backend. It needs no device and no driver.
pub trait Compiler: Send + Sync {
    /// Returns `cpu`, `cuda` or `rocm`; compare with [`Target::backend`].
    fn backend(&self) -> &'static str;

    /// Returns the compiler's name, such as `gcc 12.2.0`.
    fn name(&self) -> String;

    /// Returns everything about the compiler that can change its output for `target`, in one line:
    /// product, exact version, flags, CPU features. It contains no path, time or host name, because
    /// it is part of a cache key.
    fn fingerprint(&self, target: Target) -> String;

    /// Returns the targets that this compiler supports.
    fn targets(&self) -> Vec<Target>;

    /// Compiles a source. The same source and options give the same bytes.
    ///
    /// # Errors
    /// [`CompileError`] gives the failure with the compiler's own message.
    #[doc(hidden)]
    fn compile(
        &self,
        source: &KernelSource,
        options: &CompileOptions,
    ) -> Result<Artifact, CompileError>;
}

impl fmt::Debug for dyn Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Compiler").field(&self.name()).finish()
    }
}
