//! Losses and gradients of routers on this CPU.

use crate::kept::Kept;
use crate::router_bwd;
use crate::router_bwd::{Router, every_loss, sample};
use moesaic_cpu::{CpuCompiler, CpuDevice};
use moesaic_emit::emit;
use moesaic_kernel::{CpuIsa, Target};
use moesaic_plan::{PlanOptions, Training, plan};
use moesaic_reference::Weights;
use moesaic_spec::LayerSpec;
use moesaic_target::{CompileOptions, Compiler, Device, Module};
use std::sync::Arc;

/// Loads the kernels of the stem; nothing launches the others.
fn router(spec: &LayerSpec, isa: CpuIsa) -> Router {
    if let Err(problems) = spec.validate() {
        panic!("the test's spec is invalid: {problems:?}");
    }
    let target = Target::Cpu(isa);
    let plan = plan(spec, target, &PlanOptions::training(Training::default())).unwrap();
    let plan = router_bwd::alone(plan);
    let device = CpuDevice::with_threads(3).unwrap().poisoned();
    let compiler = Kept::new(CpuCompiler::find(None).unwrap());
    let source = emit(&plan.kernels[0], target).unwrap();
    let options = CompileOptions::default();
    let artifact = compiler.compile(&source, &options).unwrap();
    assert_eq!(artifact.report.log, "", "{}", spec.to_toml());
    let module: Arc<dyn Module> = device.load(&artifact, &source.entries).unwrap();
    Router {
        weights: Weights::random(spec, 7).rounded(spec),
        modules: vec![module],
        plan,
        device: Arc::new(device),
    }
}

#[test]
fn routers_of_every_kind() {
    let isa = moesaic_cpu::host_isa();
    for spec in (0..80).filter_map(sample) {
        let router = router(&spec, isa);
        for tokens in [0, 1, 70] {
            router.check(tokens, false);
        }
        router.check(130, true);
    }
}

#[test]
fn losses_of_every_kind() {
    for (i, spec) in every_loss().into_iter().enumerate() {
        let isa = [CpuIsa::Portable, moesaic_cpu::host_isa()][i % 2];
        let router = router(&spec, isa);
        router.check(150, false);
        router.check(37, true);
    }
}
