//! Whole passes whose GEMMs are on NVIDIA's tensor cores, on the PTX
//! interpreter: forward, backward, each stem against its formula.

use moesaic_harness::plans::planned;
use moesaic_harness::specs::{external, typed};
use moesaic_harness::{Harness, backward};
use moesaic_kernel::DType;
use moesaic_plan::{LayerPlan, Op, PlanOptions, Training};
use moesaic_spec::*;

/// A layer whose routing comes from outside, so that no gate is needed.
fn spec(d: usize, h: usize, [e, k]: [usize; 2], dtype: DType) -> LayerSpec {
    typed(external(d, h, e, k), dtype, dtype)
}

/// Backward GEMMs of the plan are of this family.
fn check_family(plan: &LayerPlan, family: &str) {
    for kernel in &plan.kernels {
        if let Op::GroupedGemmDgrad { .. } | Op::GroupedGemmWgrad { .. } = kernel.op {
            assert_eq!(kernel.family(), Some(family), "{}", kernel.name);
        }
    }
}

fn run(target: &str, family: &str, spec: &LayerSpec, tokens: &[usize]) {
    let options = PlanOptions::training(Training::default());
    let plan = planned(spec, target.parse().unwrap(), &options);
    check_family(&plan, family);
    let harness = Harness::of(plan);
    for &tokens in tokens {
        let tensors = harness.train(tokens, &[0]);
        backward::all(
            &harness,
            &tensors,
            &format!("{target}, {tokens} tokens, {spec:?}"),
        );
    }
}

#[test]
fn rows_are_gathered_or_dispatched() {
    for site in [WeightSite::Output, WeightSite::Input] {
        let mut spec = spec(40, 72, [5, 2], DType::Bf16);
        spec.router.weight_on = site;
        spec.experts.bias = true.into();
        run("sim:sm_80", "mma", &spec, &[0, 1, 60]);
        run("sim:sm_90a", "wgmma", &spec, &[0, 1, 60]);
    }
}

#[test]
fn f32_layers() {
    let mut spec = spec(33, 40, [6, 2], DType::F32);
    spec.experts.form = ExpertForm::Plain;
    run("sim:sm_80", "mma", &spec, &[0, 60]);
}

#[test]
fn shared_experts() {
    let mut spec = spec(48, 24, [4, 2], DType::F16);
    spec.shared = vec![SharedExpert {
        hidden_dim: 40,
        gate: SharedGate::None,
        bias: None,
        clamp: None,
        activation: None,
    }];
    run("sim:sm_80", "mma", &spec, &[0, 60]);
    run("sim:sm_90a", "wgmma", &spec, &[0, 60]);
}
