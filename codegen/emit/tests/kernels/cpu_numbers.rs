//! Conversions and elementary functions of the CPU kernels over their whole
//! range.

use half::{bf16, f16};
use moesaic_harness::cpu::{host, isas};
use moesaic_harness::pass::Tensors;
use moesaic_harness::{Harness, specs};
use moesaic_kernel::{CpuIsa, DType};
use moesaic_reference::{Input, activate, round_to};
use moesaic_spec::*;

/// One expert of width one behind tokens of width `d`.
fn spec(d: usize) -> LayerSpec {
    specs::spec(d, 1, 1, 1)
}

fn near(name: &str, x: f64, got: f64, want: f64, relative: f64, floor: f64) {
    let allowed = relative * want.abs().max(floor);
    assert!(
        (got - want).abs() <= allowed,
        "{name}({x}): {got} is not {want}"
    );
}

/// Runs a layer whose weights are all one on tokens of width one.
fn run_scalar(spec: &LayerSpec, isa: CpuIsa, x: &[f64]) -> Tensors {
    let mut harness = Harness::new(spec, isa, 1);
    let tensors = harness.weights.0.values_mut();
    tensors.for_each(|tensor| tensor.data.fill(1.0));
    harness.run(&Input {
        tokens: x.len(),
        x: x.to_vec(),
        ..Input::default()
    })
}

/// Values of every size up to `most`, of both signs.
fn range(most: f64) -> Vec<f64> {
    let steps = (0..1500).map(|i| f64::from((most * 0.98f64.powi(i)) as f32));
    steps.flat_map(|v| [v, -v]).chain([0.0]).collect()
}

#[test]
fn activations_are_right_everywhere() {
    let cases = [
        (Activation::Silu, 1e-30),
        (Activation::Gelu, 1e-6),
        (Activation::GeluTanh, 1e-6),
        (Activation::Relu2, 0.0),
    ];
    for isa in [CpuIsa::Portable, host()] {
        for (activation, floor) in cases.clone() {
            let mut spec = spec(1);
            spec.experts.form = ExpertForm::Plain;
            spec.experts.activation = activation.clone();
            let x = range(85.0);
            let hidden = run_scalar(&spec, isa, &x);
            for (&x, &got) in x.iter().zip(hidden.get("hidden")) {
                let want = activate(&spec.experts, None, x);
                near(
                    &format!("{isa:?} {activation:?}"),
                    x,
                    got,
                    want,
                    2e-6,
                    floor,
                );
            }
        }
    }
}

#[test]
fn scores_are_right_everywhere() {
    for isa in [CpuIsa::Portable, host()] {
        for score in [Score::Sigmoid, Score::SqrtSoftplus] {
            let mut spec = spec(1);
            spec.router.score = score;
            let x = range(80.0);
            let weights = run_scalar(&spec, isa, &x);
            for (&x, &got) in x.iter().zip(weights.get("topk_weights")) {
                let want = match score {
                    Score::Sigmoid => 1.0 / (1.0 + (-x).exp()),
                    _ => (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt(),
                };
                near(&format!("{isa:?} {score:?}"), x, got, want, 6e-7, 1e-30);
            }
        }
    }
}

/// Every bit pattern of a 16-bit type.
fn every_value(dtype: DType) -> Vec<f64> {
    let of = |bits: u16| match dtype {
        DType::F16 => f16::from_bits(bits).to_f64(),
        _ => bf16::from_bits(bits).to_f64(),
    };
    (0..=u16::MAX).map(of).collect()
}

#[test]
fn every_half_converts_and_rounds() {
    const WIDTH: usize = 16;
    for isa in isas() {
        for dtype in [DType::F16, DType::Bf16] {
            let mut spec = spec(WIDTH);
            spec.router.kind = RouterKind::External;
            spec.router.weight_on = WeightSite::Input;
            spec.precision.activations = dtype;
            let x = every_value(dtype);
            let tokens = x.len() / WIDTH;
            let weight = |token: usize| f64::from([1.0f32, 0.37, 1.001, 1.5][token % 4]);
            let weights: Vec<f64> = (0..tokens).map(weight).collect();
            let input = Input {
                tokens,
                x: x.clone(),
                routing: Some((vec![0; tokens], weights.clone())),
                ..Input::default()
            };
            let tensors = Harness::new(&spec, isa, 2).run(&input);
            for (i, (&got, &x)) in tensors.get("rows").iter().zip(&x).enumerate() {
                let product = (x as f32) * (weights[i / WIDTH] as f32);
                let want = round_to(dtype, f64::from(product));
                let same = got == want || (got.is_nan() && want.is_nan());
                assert!(
                    same,
                    "{isa:?} {dtype}: {x} * {}: {got} is not {want}",
                    weights[i / WIDTH]
                );
            }
        }
    }
}
