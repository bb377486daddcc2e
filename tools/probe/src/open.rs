//! Opens a bench by the name of its device.

use crate::bench::Bench;
use crate::idle::Idle;
use crate::kept::{Keeping, Kept};
use moesaic_cuda::NvrtcCompiler;
use moesaic_kernel::{CudaArch, SimArch, Target, TargetError};
use moesaic_ptx::{PtxCompiler, PtxDevice, PtxOptions};
use moesaic_target::{CompileError, Compiler, Device};
use moesaic_toolchain::{Registry, ToolchainError, nvrtc};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A reason that a name has no bench.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The text is no name of a device.
    #[error("the probe runs on `cuda` and on simulators such as `sim:sm_90a`, not on `{0}`")]
    Name(String),
    /// This program was built without the CUDA device.
    #[error("this probe was built without the CUDA device; build it with `--features cuda`")]
    WithoutCuda,
    /// No architecture has this name.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The simulator does not run PTX.
    #[error("`{0}` runs no PTX, which is what the probe's kernels are")]
    NoPtx(String),
    /// Kernels are kept for hardware alone.
    #[error("kernels are kept for GPUs such as `cuda:sm_90a`, not for `{0}`")]
    NotHardware(Target),
    /// The registry of compilers failed.
    #[error(transparent)]
    Toolchain(#[from] ToolchainError),
    /// There is no compiler, or none for the target.
    #[error("{0}\nor compile elsewhere with `--compile-only`, and run with `--from`")]
    Compiler(#[from] CompileError),
    /// There is no device.
    #[error(transparent)]
    Device(#[from] moesaic_target::DeviceError),
}

/// The source of kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kernels {
    /// NVRTC on this machine.
    Compiled,
    /// A folder that [`keeping`] has filled.
    Kept(PathBuf),
}

/// Opens the bench of a device: `cuda` for the first GPU of the machine, or a
/// simulator such as `sim:sm_90a`, which always compiles.
///
/// # Errors
/// [`OpenError`].
pub fn open(name: &str, kernels: &Kernels) -> Result<Bench, OpenError> {
    if name == "cuda" {
        return cuda(match kernels {
            Kernels::Compiled => Box::new(nvrtc(&Registry::open()?)?),
            Kernels::Kept(folder) => Box::new(Kept {
                folder: folder.clone(),
            }),
        });
    }
    if !name.starts_with("sim:") {
        return Err(OpenError::Name(name.to_string()));
    }
    match name.parse()? {
        Target::Sim(SimArch::Cuda(arch)) => simulated(arch, nvrtc(&Registry::open()?)?),
        _ => Err(OpenError::NoPtx(name.to_string())),
    }
}

/// Opens a bench that compiles for a target such as `cuda:sm_90a`, keeps the
/// binaries in `folder` and runs nothing.
///
/// # Errors
/// [`OpenError`].
pub fn keeping(target: &str, folder: &Path) -> Result<Bench, OpenError> {
    let target: Target = target.parse()?;
    if !matches!(target, Target::Cuda(_)) {
        return Err(OpenError::NotHardware(target));
    }
    let compiler = Keeping {
        compiler: Box::new(nvrtc(&Registry::open()?)?),
        folder: folder.to_path_buf(),
    };
    let device = Idle::new(target);
    Ok(Bench::new(target, Box::new(compiler), Arc::new(device)))
}

fn simulated(arch: CudaArch, compiler: NvrtcCompiler) -> Result<Bench, OpenError> {
    let device = PtxDevice::new(arch, PtxOptions::default());
    let compiler = PtxCompiler::new(compiler);
    let target = device.info().target;
    Ok(Bench::new(target, Box::new(compiler), Arc::new(device)))
}

#[cfg(feature = "cuda")]
fn cuda(compiler: Box<dyn Compiler>) -> Result<Bench, OpenError> {
    let device = moesaic_cuda::CudaDevice::open(0)?;
    let target = device.info().target;
    Ok(Bench::new(target, compiler, Arc::new(device)))
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: Box<dyn Compiler>) -> Result<Bench, OpenError> {
    Err(OpenError::WithoutCuda)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_names_are_explained() {
        let refusal = |name: &str| match open(name, &Kernels::Compiled) {
            Ok(_) => panic!("{name} was opened"),
            Err(error) => error.to_string(),
        };
        let cpu = "the probe runs on `cuda` and on simulators such as `sim:sm_90a`, not on `cpu`";
        assert_eq!(refusal("cpu"), cpu);
        assert!(refusal("sim:gfx942").contains("runs no PTX"));
        assert!(refusal("sim:sm_1").contains("sim:sm_1"));
        let kept = keeping("sim:sm_90a", Path::new("nowhere")).err().unwrap();
        assert!(kept.to_string().contains("not for `sim:sm_90a`"), "{kept}");
    }
}
