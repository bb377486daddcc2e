//! The same layer has the same text every time: it is part of a kernel's key.

use moesaic_emit::emit_layer;
use moesaic_kernel::Target;
use moesaic_plan::{PlanOptions, Training, plan};
use moesaic_spec::LayerSpec;
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

/// Records of routed experts have as many lengths as batches, and one kernel replays them all.
#[test]
fn a_table_of_any_length_has_one_text() {
    let of = |rows: usize, target: &str| {
        let spec = format!(
            "shape = {{ model_dim = 24, hidden_dim = 16, experts = 6, top_k = 2 }}\n\
             router = {{ kind = \"table\", table_rows = {rows}, renormalize = \"sum\" }}"
        );
        let spec = LayerSpec::from_toml(&spec).expect("a spec");
        let options = PlanOptions::training(Training::default());
        let plan = plan(&spec, target.parse().expect("a target"), &options).expect("a plan");
        emit_layer(&plan).expect("sources")
    };
    for target in ["cpu:avx2", "cuda:sm_80", "rocm:gfx942", "sim:gfx942"] {
        for (short, long) in of(3, target).iter().zip(&of(70_000, target)) {
            assert_eq!(short.text, long.text, "{} for {target}", short.name);
            assert_eq!(short.config, long.config, "{} for {target}", short.name);
        }
    }
}
