//! Random layers on simulated GPUs, forward and trained, against the reference.
//!
//! `MOESAIC_SEEDS=100..300` runs others than the few of every test run.

use super::Case;
use super::case::floats;
use super::compare::close;
use super::drawn::{COUNTERS, draw};
use super::simulated::open;
use super::training::{agrees, near, quiet};
use moesaic::reference::{self, Random};
use moesaic::spec::{LayerSpec, LossKind, testing};
use moesaic::{DType, Engine, Training};
use std::ops::Range;

/// The seeds of this run; those of a test run if none are given.
pub fn seeds(usual: Range<u64>) -> Range<u64> {
    let Ok(text) = std::env::var("MOESAIC_SEEDS") else {
        return usual;
    };
    let ends = text.split_once("..");
    let ends = ends.and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    ends.unwrap_or_else(|| panic!("MOESAIC_SEEDS={text} is not FROM..TO"))
}

/// A sample of few channels, for a simulator runs a kernel thread by thread.
pub fn tiny(seed: u64) -> LayerSpec {
    let mut spec = testing::sample(seed);
    let small = |size: &mut usize| *size = 1 + *size % 19;
    small(&mut spec.shape.model_dim);
    small(&mut spec.shape.hidden_dim);
    spec.shape.output_dim.iter_mut().for_each(small);
    spec.router.projection_dim.iter_mut().for_each(small);
    spec.shared
        .iter_mut()
        .for_each(|s| small(&mut s.hidden_dim));
    if spec.experts.identity > 0 {
        spec.shape.output_dim = None;
    }
    let valid = spec.validate();
    valid.unwrap_or_else(|problems| panic!("seed {seed}: {problems:?}"));
    spec
}

fn forward(seed: u64, engine: &Engine) {
    let tokens = [0, 1, 7, 21][seed as usize % 4];
    Case::random(&tiny(seed), tokens, seed).check(engine);
}

/// Every gradient, of any element type; `false` where a rounded score chose
/// another expert.
fn trained(seed: u64, engine: &Engine) -> bool {
    let tokens = [21, 1, 7, 0][seed as usize % 4];
    agrees(&Case::random(&quiet(tiny(seed)), tokens, seed), engine)
}

/// What the reference needs to know that a call says.
fn called(spec: &LayerSpec, tokens: usize, seed: u64) -> Case {
    let mut case = Case::random(spec, tokens, seed);
    case.input.draw = Some(draw(COUNTERS));
    let sequences = |loss: &moesaic::spec::Loss| {
        loss.kind == LossKind::Sequence && loss.sequence_length.is_none()
    };
    if spec.losses.iter().any(sequences) {
        case.input.sequence_ids = Some((0..tokens as i32).map(|t| t / 5 - 1).collect());
    }
    if spec.losses.iter().any(|loss| loss.kind == LossKind::Global) {
        let counts = (0..spec.routed_experts() as i64).map(|e| e * 3 % 7);
        case.input.global = Some((counts.collect(), tokens as u64 + 9));
    }
    case
}

/// Losses, and gradients by the router's logits, with all that is drawn.
/// Rounding would choose other experts, so types are f32; `false` where a tie in
/// f32 did so still.
fn drawn(seed: u64, engine: &Engine) -> bool {
    let mut spec = tiny(seed);
    spec.precision.weights = DType::F32;
    spec.precision.activations = DType::F32;
    spec.precision.tf32 = false;
    let tokens = 11;
    let case = called(&spec, tokens, seed);
    let what = |name: &str| format!("{name}, drawn, {}", case.describe());
    let layer = engine.training_layer(&spec, &case.host_weights(), Training::default());
    let layer = layer.unwrap_or_else(|e| panic!("{}: {e}", what("the plan")));
    let losses = reference::losses(&spec, &case.weights, &case.input);
    let names: Vec<&str> = losses.keys().map(String::as_str).collect();
    let names = [&["y", "topk_ids"], &names[..]].concat();
    let run = layer.forward_train(&case.input(), &names, COUNTERS);
    let (output, saved) = run.unwrap_or_else(|e| panic!("{}: {e}", what("forward")));
    let expected = reference::gate(&spec, &case.weights, &case.input).decision;
    if super::case::ints(&output, "topk_ids") != expected.ids {
        // `forward` holds choices against the device's own logits.
        return false;
    }
    for (name, value) in &losses {
        close(&what(name), &floats(&output, name), &[*value], 2e-4);
    }
    let dy = Random::new(seed).vec(tokens * spec.output_dim());
    let given = super::case::host(DType::F32, &[tokens, spec.output_dim()], &dy);
    let back = layer.backward(&saved, &given, false);
    let back = back.unwrap_or_else(|e| panic!("{}: {e}", what("backward")));
    let want = reference::backward(&spec, &case.weights, &case.input, &dy);
    let all = want.weights.values().flat_map(|t| &t.data).chain(&want.x);
    let largest = all.fold(0.0, |most: f64, v| most.max(v.abs()));
    near(&what("dx"), &spec, &floats(&back, "dx"), &want.x, largest);
    for (name, gradient) in layer.gradients().expect("the layer trains") {
        let found: Vec<f64> = gradient.to_f32().into_iter().map(f64::from).collect();
        near(
            &what(&name),
            &spec,
            &found,
            &want.weights[&name].data,
            largest,
        );
    }
    true
}

fn agree(target: &str) {
    let engine = open(target);
    let (mut compared, mut passed_over) = (0, Vec::new());
    for seed in seeds(500..504) {
        let held = match seed % 3 {
            0 => {
                forward(seed, &engine);
                continue;
            }
            1 => trained(seed, &engine),
            _ => drawn(seed, &engine),
        };
        match held {
            true => compared += 1,
            false => passed_over.push(seed),
        }
    }
    println!("{compared} compared; others chosen in {passed_over:?}");
    let few = passed_over.len() * 4 <= compared;
    assert!(
        compared > 0 && few,
        "{compared} compared, not {passed_over:?}"
    );
}

macro_rules! on_each {
    ($($name:ident: $target:literal),* $(,)?) => {$(
        #[test]
        fn $name() {
            agree($target);
        }
    )*};
}

on_each! {
    sm_80_agrees_on_random_layers: "sim:sm_80",
    sm_90a_agrees_on_random_layers: "sim:sm_90a",
    gfx942_agrees_on_random_layers: "sim:gfx942",
    gfx1100_agrees_on_random_layers: "sim:gfx1100",
}
