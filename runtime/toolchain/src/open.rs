//! Compilers, from the registry or from the machine; and the installed MPI.

use crate::{Kind, Registry};
use moesaic_cpu::CpuCompiler;
use moesaic_cuda::NvrtcCompiler;
use moesaic_rocm::{ClangTool, RocmCompiler};
use moesaic_target::CompileError;
use std::path::PathBuf;

/// The CUDA compiler: `MOESAIC_NVRTC`, the registry's, then the machine's.
///
/// # Errors
/// [`CompileError::NoCompiler`] lists what was tried.
pub fn nvrtc(registry: &Registry) -> Result<NvrtcCompiler, CompileError> {
    NvrtcCompiler::find(file(registry, Kind::Cuda).as_deref())
}

/// The AMD compiler: `MOESAIC_CLANG`, the registry's, then the machine's.
///
/// # Errors
/// [`CompileError::NoCompiler`] lists what was tried.
pub fn rocm(registry: &Registry) -> Result<RocmCompiler, CompileError> {
    let tool = registry.get(Kind::Rocm).and_then(|tool| {
        let zig = registry.path(tool);
        Some(ClangTool {
            facts: tool.clang.clone(),
            ..ClangTool::zig(zig.parent()?)
        })
    });
    RocmCompiler::find(tool.as_ref())
}

/// The C compiler: `MOESAIC_CC`, the machine's, then the registry's.
///
/// # Errors
/// [`CompileError::NoCompiler`] lists what was tried.
pub fn c(registry: &Registry) -> Result<CpuCompiler, CompileError> {
    CpuCompiler::find(file(registry, Kind::C).as_deref())
}

/// An MPI that was installed: the machine's own are found by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstalledMpi {
    /// `mpiexec`.
    pub launcher: PathBuf,
    /// `libmpi_abi.so.1`, with the standard ABI of MPI 5.
    pub library: PathBuf,
}

/// The registry's MPI, if there is one.
pub fn mpi(registry: &Registry) -> Option<InstalledMpi> {
    let library = file(registry, Kind::Mpi)?;
    Some(InstalledMpi {
        launcher: library.parent()?.join("mpiexec"),
        library,
    })
}

fn file(registry: &Registry, kind: Kind) -> Option<PathBuf> {
    registry.get(kind).map(|tool| registry.path(tool))
}
