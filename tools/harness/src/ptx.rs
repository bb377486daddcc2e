//! A plan's kernels on the PTX interpreter.

use crate::Loaded;
use crate::kept::Kept;
use moesaic_emit::emit;
use moesaic_kernel::{KernelSource, SimArch, Target};
use moesaic_plan::LayerPlan;
use moesaic_ptx::{PtxCompiler, PtxDevice, PtxOptions};
use moesaic_target::{Artifact, CompileOptions, Compiler, Device};
use moesaic_toolchain::testing;
use std::sync::{Arc, LazyLock};

/// A simulated GPU whose engines are late by `seed`.
pub fn device(target: Target, seed: u64) -> PtxDevice {
    let Target::Sim(SimArch::Cuda(arch)) = target else {
        panic!("{target} is no simulated NVIDIA GPU")
    };
    let options = PtxOptions {
        seed,
        ..PtxOptions::default()
    };
    PtxDevice::new(arch, options)
}

/// The kernels of a plan.
pub fn load(plan: &LayerPlan, seed: u64) -> Loaded {
    let device = device(plan.target, seed);
    let modules = plan.kernels.iter().map(|kernel| {
        let source = emit(kernel, plan.target).unwrap();
        let module = device.load(&compiled(&source), &source.entries);
        module.unwrap_or_else(|error| panic!("{error}"))
    });
    let modules = modules.collect();
    (Arc::new(device), modules)
}

/// The PTX of a source.
pub fn compiled(source: &KernelSource) -> Artifact {
    static COMPILER: LazyLock<Kept> =
        LazyLock::new(|| Kept::new(PtxCompiler::new(testing::nvrtc())));
    let artifact = COMPILER.compile(source, &CompileOptions::default());
    artifact.unwrap_or_else(|error| panic!("{error}"))
}
