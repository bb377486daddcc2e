//! Opens compilers from the registry or the machine, and the installed MPI.

use crate::{Registry, ToolKind};
use moesaic_cpu::CpuCompiler;
use moesaic_cuda::NvrtcCompiler;
use moesaic_rocm::{ClangTool, RocmCompiler};
use moesaic_target::CompileError;
use std::path::PathBuf;

/// Opens the CUDA compiler: that of `MOESAIC_NVRTC`, else the registry's, else the machine's.
///
/// # Errors
/// [`CompileError::NoCompiler`] lists the places searched.
pub fn nvrtc(registry: &Registry) -> Result<NvrtcCompiler, CompileError> {
    NvrtcCompiler::find(file(registry, ToolKind::Cuda).as_deref())
}

/// Opens the AMD compiler: that of `MOESAIC_CLANG`, else the registry's, else the machine's.
///
/// # Errors
/// [`CompileError::NoCompiler`] lists the places searched.
pub fn rocm(registry: &Registry) -> Result<RocmCompiler, CompileError> {
    let tool = registry.get(ToolKind::Rocm).and_then(|tool| {
        let zig = registry.path(tool);
        Some(ClangTool {
            facts: tool.clang.clone(),
            ..ClangTool::zig(zig.parent()?)
        })
    });
    RocmCompiler::find(tool.as_ref())
}

/// Opens the C compiler: that of `MOESAIC_CC`, else the machine's, else the registry's.
///
/// # Errors
/// [`CompileError::NoCompiler`] lists the places searched.
pub fn c(registry: &Registry) -> Result<CpuCompiler, CompileError> {
    CpuCompiler::find(file(registry, ToolKind::C).as_deref())
}

/// An MPI that moesaic installed. The machine's own MPI is found by name instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstalledMpi {
    /// The path of `mpiexec`.
    pub launcher: PathBuf,
    /// The path of `libmpi_abi.so.1`, with the standard ABI of MPI 5.
    pub library: PathBuf,
}

/// Returns the registry's MPI, if there is one.
pub fn mpi(registry: &Registry) -> Option<InstalledMpi> {
    let library = file(registry, ToolKind::Mpi)?;
    Some(InstalledMpi {
        launcher: library.parent()?.join("mpiexec"),
        library,
    })
}

fn file(registry: &Registry, kind: ToolKind) -> Option<PathBuf> {
    registry.get(kind).map(|tool| registry.path(tool))
}
