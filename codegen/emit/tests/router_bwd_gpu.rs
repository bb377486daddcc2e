//! Losses and gradients of routers as GPUs compute them, thread by thread on
//! this CPU.

mod gpu_host;
mod rig;
mod router_bwd;

use gpu_host::{device, modules_of};
use moesaic_kernel::Stem;
use moesaic_plan::{Training, plan_training};
use moesaic_reference::Weights;
use moesaic_spec::LayerSpec;
use router_bwd::{Router, every_loss, sample};

/// A target with warps of 32 and one with waves of 64.
const TARGETS: [&str; 2] = ["cuda:sm_80", "rocm:gfx942"];

fn router(spec: &LayerSpec, target: &str) -> Router {
    let plan = plan_training(spec, target.parse().unwrap(), Training::default()).unwrap();
    let device = device(&plan);
    let modules = modules_of(&plan, &device, &[Stem::GateTopkBwd]);
    Router {
        weights: Weights::random(spec, 7).rounded(spec),
        modules,
        plan,
        device: Box::new(device),
    }
}

#[test]
fn routers_of_every_kind() {
    for (i, spec) in (100..130).filter_map(sample).enumerate() {
        let router = router(&spec, TARGETS[i % 2]);
        for tokens in [0, 1] {
            router.check(tokens, false);
        }
        router.check(70, i % 3 == 0);
    }
}

#[test]
fn losses_of_every_kind() {
    for (i, spec) in every_loss().into_iter().enumerate() {
        let router = router(&spec, TARGETS[i % 2]);
        router.check(70, false);
        router.check(37, true);
    }
}
