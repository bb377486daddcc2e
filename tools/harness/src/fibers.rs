//! GPU kernels on this CPU: the simulator of an AMD GPU, one fiber per thread
//! of a block. It runs every launch under several orders of the threads, and
//! watches what they do to memory.

use crate::Loaded;
use crate::kept::Kept;
use moesaic_emit::{Prelude, emit_with};
use moesaic_fibers::{FiberCompiler, FiberDevice, FiberOptions};
use moesaic_kernel::{KernelSource, RocmArch, SimArch, Target};
use moesaic_plan::{KernelPlan, LayerPlan};
use moesaic_target::{Artifact, CompileOptions, Compiler, Device};
use std::sync::{Arc, LazyLock};

/// The GPU that is simulated for a target: itself, or one with warps as wide.
fn arch(target: Target) -> RocmArch {
    let standin = match target {
        Target::Cuda(_) => "rocm:gfx1100".parse().unwrap(),
        other => other.hardware(),
    };
    match standin {
        Target::Rocm(arch) => arch,
        other => panic!("{other} has no fibers"),
    }
}

/// What runs kernels for a target.
pub fn device(target: Target) -> FiberDevice {
    FiberDevice::new(arch(target), FiberOptions::default()).unwrap()
}

/// The kernels of a plan.
pub fn load(plan: &LayerPlan) -> Loaded {
    let device = device(plan.target);
    let modules = plan.kernels.iter().map(|kernel| {
        let source = emitted(kernel, plan.target);
        device.load(&compiled(&source), &source.entries).unwrap()
    });
    let modules = modules.collect();
    (Arc::new(device), modules)
}

/// A kernel over the prelude of the simulator.
pub fn emitted(kernel: &KernelPlan, target: Target) -> KernelSource {
    let mut source = emit_with(kernel, target, Prelude::Sim).unwrap();
    source.target = Target::Sim(SimArch::Rocm(arch(target)));
    source
}

/// A compiled source; no warning is accepted.
pub fn compiled(source: &KernelSource) -> Artifact {
    static COMPILER: LazyLock<Kept> =
        LazyLock::new(|| Kept::new(FiberCompiler::find(None).unwrap()));
    let artifact = COMPILER.compile(source, &CompileOptions::default());
    let artifact = artifact.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(
        artifact.report.log, "",
        "{} for {}",
        source.name, source.target
    );
    artifact
}
