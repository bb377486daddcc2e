//! From kernel source to artifact.

use crate::{Artifact, CompileError};
use moesaic_kernel::{KernelSource, Target};

/// What a caller may ask of a compile, beyond the source itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CompileOptions {
    /// Accept kernels that spill registers to local memory. Without it a
    /// spill is a [`CompileError::Spills`].
    pub allow_spills: bool,
    /// Accept kernels whose wgmma instructions the assembler serialises, or
    /// whose `setmaxnreg` it ignores: they are right and several times slower
    /// than they look. Without it they are a [`CompileError::PerformanceLoss`].
    pub allow_performance_loss: bool,
}

/// A run-time compiler for one backend. Needs no device and no driver.
pub trait Compiler: Send + Sync {
    /// `cpu`, `cuda` or `rocm`: compare with [`Target::backend`].
    fn backend(&self) -> &'static str;

    /// The compiler as people know it: `gcc 12.2.0`.
    fn name(&self) -> String;

    /// Everything about the compiler that can change its output for `target`,
    /// as one line: product, exact version, flags, CPU features. Holds no
    /// path, time or host name, since it is part of a cache key.
    fn fingerprint(&self, target: Target) -> String;

    /// The targets this compiler can compile for.
    fn targets(&self) -> Vec<Target>;

    /// Compiles. The same source and options give the same bytes.
    ///
    /// # Errors
    /// [`CompileError`] says what failed, with the compiler's own words.
    fn compile(
        &self,
        source: &KernelSource,
        options: &CompileOptions,
    ) -> Result<Artifact, CompileError>;
}
