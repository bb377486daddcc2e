//! What 16-bit types cost: the error of a layer against exact arithmetic on
//! exact numbers is at most twice that of rounding inputs and outputs alone.

use super::Case;
use super::case::{floats, host};
use super::layers::engine;
use moesaic::reference::{self, Random};
use moesaic::spec::LayerSpec;
use moesaic::{Counters, DType, Engine, Training};
use std::collections::BTreeMap;

/// Results of both passes, by name.
type Results = BTreeMap<String, Vec<f64>>;

/// Routing is given, so that no rounding sends a token elsewhere.
fn spec(dtype: DType, experts: &str) -> LayerSpec {
    let toml = format!(
        "shape = {{ model_dim = 96, hidden_dim = 64, experts = 6, top_k = 2 }}\n\
         [precision]\nweights = \"{dtype}\"\nactivations = \"{dtype}\"\n\
         [router]\nkind = \"external\"\n[experts]\n{experts}\n"
    );
    LayerSpec::from_toml(&toml).unwrap()
}

/// In f64; outputs rounded as they are stored, if asked.
fn exact(case: &Case, dy: &[f64], stored: bool) -> Results {
    let y = reference::forward(&case.spec, &case.weights, &case.input).y;
    let back = reference::backward(&case.spec, &case.weights, &case.input, dy);
    let round = |v: &f64| match stored {
        true => reference::round_to(case.spec.precision.activations, *v),
        false => *v,
    };
    let mut all = Results::new();
    all.insert("y".to_string(), y.iter().map(round).collect());
    all.insert("dx".to_string(), back.x.iter().map(round).collect());
    all.extend(back.weights.into_iter().map(|(name, t)| (name, t.data)));
    all
}

fn computed(case: &Case, dy: &[f64], engine: &Engine) -> Results {
    let weights = case.host_weights();
    let layer = engine
        .training_layer(&case.spec, &weights, Training::default())
        .unwrap();
    let passed = layer.forward_train(&case.input(), &["y"], Counters::default());
    let (output, saved) = passed.unwrap();
    let dtype = case.spec.precision.activations;
    let dy = host(dtype, &[case.input.tokens, case.spec.output_dim()], dy);
    let back = layer.backward(&saved, &dy, false).unwrap();
    let mut all = Results::new();
    all.insert("y".to_string(), floats(&output, "y"));
    all.insert("dx".to_string(), floats(&back, "dx"));
    for (name, gradient) in layer.gradients().unwrap() {
        all.insert(name, gradient.to_f32().into_iter().map(f64::from).collect());
    }
    all
}

/// Root mean square of the difference.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let squares = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b));
    (squares.sum::<f64>() / a.len() as f64).sqrt()
}

fn check(dtype: DType, experts: &str, engine: &Engine) {
    let spec = spec(dtype, experts);
    let mut case = Case::random(&spec, 80, 21);
    let mut random = Random::new(22);
    case.weights = reference::Weights::random(&spec, 23);
    case.input.x = random.vec(80 * 96);
    let dy = random.vec(80 * 96);
    let truth = exact(&case, &dy, false);
    let round = |v: &f64| reference::round_to(dtype, *v);
    case.weights = case.weights.rounded(&spec);
    case.input.x = case.input.x.iter().map(round).collect();
    let dy: Vec<f64> = dy.iter().map(round).collect();
    let least = exact(&case, &dy, true);
    for (name, found) in computed(&case, &dy, engine) {
        let (error, least) = (
            distance(&found, &truth[&name]),
            distance(&least[&name], &truth[&name]),
        );
        assert!(least > 0.0, "{name} has no rounding to compare with");
        assert!(
            error <= 2.0 * least,
            "{dtype} {experts:?} on {}: {name} is off by {error:.2e}, rounding alone {least:.2e}",
            engine.target()
        );
    }
}

#[test]
fn sixteen_bits_cost_at_most_twice_their_rounding() {
    let engine = engine();
    for dtype in [DType::Bf16, DType::F16] {
        for experts in ["", "bias = true", "form = \"plain\"\nactivation = \"gelu\""] {
            check(dtype, experts, &engine);
        }
    }
}
