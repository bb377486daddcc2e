//! Random layers of few channels on one engine, by their seeds, and what they draw.

use super::Case;
use super::case::{floats, host, ints};
use super::cases::{quiet, tiny};
use super::compare::close;
use super::trained::{RNG_KEY, agrees, draw, near};
use moesaic::reference::{self, Random};
use moesaic::spec::{Activation, CapacityMode, LayerSpec, LossKind};
use moesaic::{DType, Engine, Training};

/// Tokens that no routed expert computes anything for.
pub fn empty_tokens(case: &Case) -> Vec<usize> {
    let (spec, k) = (&case.spec, case.spec.shape.top_k);
    let decision = reference::gate(spec, &case.weights, &case.drawing()).decision;
    let placed = reference::scan(spec, &decision, &case.drawing());
    let reaches = |slot: usize| reference::kept(spec, decision.ids[slot], placed.locations[slot]);
    let empty = |t: &usize| !(t * k..(t + 1) * k).any(reaches);
    (0..case.input.tokens).filter(empty).collect()
}

/// A case of which, by the seed, one token may be no number: one that every expert passes
/// over, or any.
fn spoilt(mut case: Case, seed: u64) -> Case {
    let mut random = Random::new(seed ^ 0x0bad);
    let (d, draw) = (case.spec.shape.model_dim as u64, random.bits() % 3);
    let empty = match case.spec.capacity.mode {
        CapacityMode::Dropless => empty_tokens(&case),
        // Where a token that is NaN chooses other experts, it may find room.
        _ => vec![],
    };
    // Which side of a kink a NaN is on, and so the slope there, no rule says.
    let kinks = matches!(case.spec.experts.activation, Activation::Custom(_));
    let padding = case.spec.shared.is_empty() && !empty.is_empty();
    let (t, value) = match draw {
        1 if padding => (empty[0], f64::INFINITY),
        1 if !empty.is_empty() => (empty[0], f64::NAN),
        2 if case.input.tokens > 0 && !kinks => {
            (random.bits() as usize % case.input.tokens, f64::NAN)
        }
        _ => return case,
    };
    let channel = random.bits() % d;
    case.input.x[t * d as usize + channel as usize] = value;
    case
}

pub fn forward(seed: u64, engine: &Engine) {
    let tokens = [0, 1, 7, 21][seed as usize % 4];
    spoilt(Case::random(&tiny(seed), tokens, seed), seed).check(engine);
}

/// Every gradient, of any element type; `false` where a rounded score chose
/// another expert.
pub fn trained(seed: u64, engine: &Engine) -> bool {
    let tokens = [21, 1, 7, 0][seed as usize % 4];
    let case = Case::random(&quiet(tiny(seed)), tokens, seed);
    agrees(&spoilt(case, seed), engine)
}

/// Returns a case with the inputs of the call that the reference needs.
fn called(spec: &LayerSpec, tokens: usize, seed: u64) -> Case {
    let mut case = Case::random(spec, tokens, seed);
    case.input.draw = Some(draw(RNG_KEY));
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
pub fn drawn(seed: u64, engine: &Engine) -> bool {
    let mut spec = tiny(seed);
    spec.precision.weights = DType::F32;
    spec.precision.activations = DType::F32;
    spec.precision.expert_gradients = DType::F32;
    spec.precision.tf32 = false;
    let tokens = 11;
    let case = spoilt(called(&spec, tokens, seed), seed);
    let what = |name: &str| format!("{name}, drawn, {}", case.describe());
    let layer = engine.training_layer(&spec, &case.host_weights(), Training::default());
    let layer = layer.unwrap_or_else(|e| panic!("{}: {e}", what("the plan")));
    let losses = reference::losses(&spec, &case.weights, &case.input);
    let names: Vec<&str> = losses.keys().map(String::as_str).collect();
    let names = [&["y", "topk_ids"], &names[..]].concat();
    let run = layer.forward_train(case.input().reading(&names), RNG_KEY);
    let (output, saved) = run.unwrap_or_else(|e| panic!("{}: {e}", what("forward")));
    let expected = reference::gate(&spec, &case.weights, &case.input).decision;
    if ints(&output, "topk_ids") != expected.ids {
        // `forward` holds choices against the device's own logits.
        return false;
    }
    for (name, value) in &losses {
        close(&what(name), &floats(&output, name), &[*value], 2e-4);
    }
    let dy = Random::new(seed).vec(tokens * spec.output_dim());
    let given = host(DType::F32, &[tokens, spec.output_dim()], &dy);
    let back = layer.backward(&saved, &given, false);
    let back = back.unwrap_or_else(|e| panic!("{}: {e}", what("backward")));
    let want = reference::backward(&spec, &case.weights, &case.input, &dy);
    let all = want.weights.values().flat_map(|t| &t.data).chain(&want.x);
    let largest = all
        .filter(|v| v.is_finite())
        .fold(0.0, |most: f64, v| most.max(v.abs()));
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

/// Trains once with what is drawn; holds losses and gradients against the
/// reference.
pub fn gradients_of(spec: &LayerSpec, engine: &Engine) {
    gradients_of_case(Case::random(spec, 29, 5), engine);
}

/// The same of a case; its dy is the seed's.
pub fn gradients_of_case(mut case: Case, engine: &Engine) {
    let (target, tokens) = (engine.target(), case.input.tokens);
    case.input.draw = Some(draw(RNG_KEY));
    let spec = &case.spec;
    let what = |name: &str| format!("{name} on {target} of {}", spec.to_toml());
    let layer = engine.training_layer(spec, &case.host_weights(), Training::default());
    let layer = layer.unwrap_or_else(|e| panic!("{}: {e}", what("the plan")));
    let dy = Random::new(9).vec(tokens * spec.output_dim());
    let losses = reference::losses(spec, &case.weights, &case.input);
    let names: Vec<&str> = losses.keys().map(String::as_str).collect();
    let names = [&["y", "topk_ids"], &names[..]].concat();
    let forward = layer.forward_train(case.input().reading(&names), RNG_KEY);
    let (output, saved) = forward.unwrap_or_else(|e| panic!("{}: {e}", what("forward")));
    let expected = reference::gate(spec, &case.weights, &case.input).decision;
    assert_eq!(ints(&output, "topk_ids"), expected.ids, "{}", what("ids"));
    for (name, value) in &losses {
        close(&what(name), &floats(&output, name), &[*value], 2e-5);
    }
    let given = host(
        spec.precision.activations,
        &[tokens, spec.output_dim()],
        &dy,
    );
    let back = layer.backward(&saved, &given, false);
    let back = back.unwrap_or_else(|e| panic!("{}: {e}", what("backward")));
    let expected = reference::backward(spec, &case.weights, &case.input, &dy);
    close(&what("dx"), &floats(&back, "dx"), &expected.x, 2e-5);
    for (name, gradient) in layer.gradients().expect("the layer trains") {
        let found: Vec<f64> = gradient.to_f32().into_iter().map(f64::from).collect();
        close(&what(&name), &found, &expected.weights[&name].data, 2e-5);
    }
}
