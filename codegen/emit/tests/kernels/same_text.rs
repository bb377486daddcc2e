//! The same layer has the same text every time: it is part of a kernel's key.

use moesaic_emit::emit_layer;
use moesaic_kernel::Target;
use moesaic_plan::{PlanOptions, Training, plan};
use moesaic_spec::testing::sample;

#[test]
fn a_layer_has_one_text() {
    for target in ["cpu:avx2", "cuda:sm_90a", "rocm:gfx942", "sim:gfx942"] {
        let target: Target = target.parse().expect("a target");
        for seed in 0..40 {
            let spec = sample(seed);
            let plan =
                plan(&spec, target, &PlanOptions::training(Training::default())).expect("a plan");
            let texts = || emit_layer(&plan).expect("sources");
            for (first, again) in texts().iter().zip(&texts()) {
                assert_eq!(first.text, again.text, "{} of seed {seed}", first.name);
            }
        }
    }
}
