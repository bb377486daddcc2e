//! Whole passes whose products are on NVIDIA's matrix units, on the PTX
//! interpreter: forward, backward, each stem against its formula.

use crate::gemms::simulated::simulated;
use crate::rig::{Rig, backward};
use moesaic_kernel::DType;
use moesaic_plan::{LayerPlan, Op, PlanOptions, Training, plan};
use moesaic_reference::{Random, round_to};
use moesaic_spec::*;

/// A layer whose routing comes from outside, so that no gate is needed.
fn spec(d: usize, h: usize, [e, k]: [usize; 2], dtype: DType) -> LayerSpec {
    let text = format!(
        r#"{{"shape":{{"model_dim":{d},"hidden_dim":{h},"experts":{e},"top_k":{k}}},
            "router":{{"kind":"external"}}}}"#
    );
    let mut spec: LayerSpec = serde_json::from_str(&text).unwrap();
    spec.precision.weights = dtype;
    spec.precision.activations = dtype;
    spec
}

/// Backward products of the plan are of this family.
fn check_family(plan: &LayerPlan, family: &str) {
    for kernel in &plan.kernels {
        if let Op::GroupedGemmDgrad { .. } | Op::GroupedGemmWgrad { .. } = kernel.op {
            assert_eq!(kernel.family(), Some(family), "{}", kernel.name);
        }
    }
}

fn run(target: &str, family: &str, spec: &LayerSpec, tokens: &[usize]) {
    let plan = plan(
        spec,
        target.parse().unwrap(),
        &PlanOptions::training(Training::default()),
    )
    .unwrap();
    check_family(&plan, family);
    let (device, modules) = simulated(&plan, 1);
    let rig = Rig::sharing(plan, device, modules);
    for &tokens in tokens {
        let input = rig.random_input(tokens, tokens as u64);
        let dy = Random::new(99).vec(tokens * spec.output_dim());
        let dy = dy
            .into_iter()
            .map(|v| round_to(spec.precision.activations, v));
        let dy: Vec<f64> = dy.collect();
        let tensors = rig.run_training(&input, &dy, &[0]);
        backward::all(
            &rig,
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
    }];
    run("sim:sm_80", "mma", &spec, &[0, 60]);
    run("sim:sm_90a", "wgmma", &spec, &[0, 60]);
}
