//! The cost of 16-bit types: the error of a layer against exact arithmetic on
//! exact numbers is at most twice that of rounding inputs and outputs alone.

use super::Case;
use super::layers::engine;
use super::trained::Results;
use moesaic::reference::{self, Random};
use moesaic::spec::LayerSpec;
use moesaic::{DType, Engine, Recompute};

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
    let mut all = case.trained(dy);
    all.remove("grad.topk_weights");
    let dtype = case.spec.precision.activations;
    for name in ["y", "dx"].iter().filter(|_| stored) {
        let values = all.get_mut(*name).expect("both are there");
        values
            .iter_mut()
            .for_each(|v| *v = reference::round_to(dtype, *v));
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
    let layer = case.training_layer(engine, Recompute::None);
    let (found, _) = case.train(&layer, &dy, &[false]);
    for (name, truth) in &truth {
        let (error, least) = (distance(&found[name], truth), distance(&least[name], truth));
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
