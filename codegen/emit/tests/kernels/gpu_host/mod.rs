//! GPU kernels on this CPU: the simulator of an AMD GPU, one fiber per thread
//! of a block. It runs every launch under several orders of the threads, and
//! watches what they do to memory.

use crate::kept::Kept;
use moesaic_emit::{Prelude, emit_with};
use moesaic_fibers::{FiberCompiler, FiberDevice, FiberOptions};
use moesaic_kernel::{KernelSource, RocmArch, SimArch, Stem, Target};
use moesaic_plan::{KernelPlan, LayerPlan, PlanOptions, plan};
use moesaic_spec::LayerSpec;
use moesaic_target::{
    Arg, Artifact, CompileOptions, Compiler, Device, DeviceError, FunctionId, LaunchDims, Module,
};
use std::sync::{Arc, LazyLock};

/// The kernels of a source that nothing launches.
struct Absent;

/// The plan of a valid spec.
pub fn planned(spec: &LayerSpec, gpu: &str) -> LayerPlan {
    if let Err(problems) = spec.validate() {
        panic!("the test's spec is invalid: {problems:?}");
    }
    plan(spec, gpu.parse().unwrap(), &PlanOptions::default()).unwrap()
}

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

/// The device that runs a plan.
pub fn device(plan: &LayerPlan) -> FiberDevice {
    FiberDevice::new(arch(plan.target), FiberOptions::default()).unwrap()
}

/// A kernel over the prelude of the simulator.
pub fn emitted(kernel: &KernelPlan, target: Target) -> KernelSource {
    let mut source = emit_with(kernel, target, Prelude::Sim).unwrap();
    source.target = Target::Sim(SimArch::Rocm(arch(target)));
    source
}

/// Emits, compiles and loads every kernel of a layer.
pub fn modules(plan: &LayerPlan, device: &FiberDevice) -> Vec<Arc<dyn Module>> {
    modules_of(plan, device, &Stem::FORWARD)
}

/// Emits, compiles and loads every kernel of a plan, those of training too.
pub fn all_modules(plan: &LayerPlan, device: &FiberDevice) -> Vec<Arc<dyn Module>> {
    let load = |kernel: &KernelPlan| {
        let source = emitted(kernel, plan.target);
        device.load(&compiled(&source), &source.entries).unwrap()
    };
    plan.kernels.iter().map(load).collect()
}

/// Emits, compiles and loads the kernels of some stems; nothing may launch the
/// others.
pub fn modules_of(plan: &LayerPlan, device: &FiberDevice, stems: &[Stem]) -> Vec<Arc<dyn Module>> {
    let load = |kernel: &KernelPlan| {
        if !stems.contains(&kernel.stem()) {
            return Arc::new(Absent) as Arc<dyn Module>;
        }
        let source = emitted(kernel, plan.target);
        device.load(&compiled(&source), &source.entries).unwrap()
    };
    plan.kernels.iter().map(load).collect()
}

/// A compiled source; no warning is accepted.
pub fn compiled(source: &KernelSource) -> Artifact {
    static COMPILER: LazyLock<Kept> =
        LazyLock::new(|| Kept::new(FiberCompiler::find(None).unwrap()));
    let artifact = COMPILER
        .compile(source, &CompileOptions::default())
        .unwrap();
    assert_eq!(
        artifact.report.log, "",
        "{} for {}",
        source.name, source.target
    );
    artifact
}

impl Module for Absent {
    fn function(&self, symbol: &str) -> Result<FunctionId, DeviceError> {
        panic!("{symbol} was left out");
    }

    unsafe fn run(&self, _: FunctionId, _: LaunchDims, _: &[Arg]) -> Result<(), DeviceError> {
        unreachable!("there is no function")
    }
}
