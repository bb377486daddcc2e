//! Losses and gradients of routers as GPUs compute them, thread by thread on
//! this CPU.

use moesaic_harness::router_bwd::{Router, every_loss, sample};
use moesaic_spec::LayerSpec;

/// A target with warps of 32 and one with waves of 64.
const TARGETS: [&str; 2] = ["cuda:sm_80", "rocm:gfx942"];

fn router(spec: &LayerSpec, target: &str) -> Router {
    Router::new(spec, target.parse().unwrap())
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

/// The PTX that NVRTC makes of the text.
#[test]
fn on_simulated_gpus() {
    let samples = (130..150).filter_map(sample);
    let losses = every_loss().into_iter().step_by(5);
    for (i, spec) in samples.chain(losses).enumerate() {
        let router = router(&spec, ["sim:sm_80", "sim:sm_90a"][i % 2]);
        router.check(1, false);
        router.check(40, i % 2 == 1);
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
