//! A plan's kernels on the PTX interpreter.

use crate::kept::Kept;
use moesaic_emit::emit;
use moesaic_kernel::{KernelSource, SimArch, Target};
use moesaic_plan::LayerPlan;
use moesaic_ptx::{PtxCompiler, PtxDevice, PtxOptions};
use moesaic_target::{Artifact, CompileOptions, Compiler, Device, Module};
use moesaic_toolchain::testing;
use std::sync::{Arc, LazyLock};

/// A simulated GPU whose engines are late by `seed`, and the plan's kernels on it.
pub fn simulated(plan: &LayerPlan, seed: u64) -> (Arc<dyn Device>, Vec<Arc<dyn Module>>) {
    let Target::Sim(SimArch::Cuda(arch)) = plan.target else {
        panic!("{} is no simulated NVIDIA GPU", plan.target)
    };
    let options = PtxOptions {
        seed,
        ..PtxOptions::default()
    };
    let device = PtxDevice::new(arch, options);
    let modules = plan.kernels.iter().map(|kernel| {
        let source = emit(kernel, plan.target).unwrap();
        let module = device.load(&compiled(&source), &source.entries);
        module.unwrap_or_else(|error| panic!("{error}"))
    });
    let modules = modules.collect();
    (Arc::new(device), modules)
}

/// The PTX of a source.
fn compiled(source: &KernelSource) -> Artifact {
    let artifact = COMPILER.compile(source, &CompileOptions::default());
    artifact.unwrap_or_else(|error| panic!("{error}"))
}

static COMPILER: LazyLock<Kept> = LazyLock::new(|| Kept::new(PtxCompiler::new(testing::nvrtc())));
