//! Gradients of whole layers against the f64 reference.

use super::Case;
use super::cases::quiet;
use super::layers::{engine, engines, shipped};
use super::trained::{Results, agrees};
use moesaic::spec::{LayerSpec, testing};
use moesaic::{DType, Engine, EngineOptions, Layer, Recompute};
use moesaic_harness::thorough::{in_turns, one_in};

const BASE: &str = "shape = { model_dim = 37, hidden_dim = 21, experts = 5, top_k = 2 }";

fn base(change: impl FnOnce(&mut LayerSpec)) -> LayerSpec {
    let mut spec = LayerSpec::from_toml(BASE).expect("a valid spec");
    change(&mut spec);
    spec
}

/// Gradients after one backward pass per element of `accumulate`, and the ids.
fn gradients(case: &Case, layer: &Layer, accumulate: &[bool]) -> (Results, Vec<i32>) {
    case.train(layer, &case.dy(77), accumulate)
}

#[test]
fn random_specs_have_the_gradients_of_the_reference() {
    let widest = engine().target();
    for engine in shipped() {
        let seeds: Vec<u64> = if engine.target() == widest {
            one_in(5, 0, 0..12).collect()
        } else {
            in_turns(0, 200..202).collect()
        };
        let count = seeds.len();
        let mut compared = 0;
        for seed in seeds {
            let spec = quiet(testing::sample(seed));
            let tokens = [1, 7, 33, 100][seed as usize % 4];
            compared += i32::from(agrees(&Case::random(&spec, tokens, seed), &engine));
        }
        assert!(compared as usize * 10 >= count * 9, "{compared} of {count}");
    }
}

#[test]
fn odd_sizes_have_the_gradients_of_the_reference() {
    let engine = engine();
    let shapes = [(1, 1, 1, 1), (3, 5, 2, 1), (37, 21, 5, 5), (129, 130, 3, 2)];
    for (i, (d, h, e, k)) in shapes.into_iter().enumerate() {
        for dtype in in_turns(i, [DType::F32, DType::Bf16, DType::F16]) {
            let spec = base(|s| {
                (s.shape.model_dim, s.shape.hidden_dim) = (d, h);
                (s.shape.experts, s.shape.top_k) = (e, k);
                (s.precision.weights, s.precision.activations) = (dtype, dtype);
            });
            for tokens in [0, 1, 33, 777] {
                let case = Case::random(&spec, tokens, (d * h) as u64);
                assert!(agrees(&case, &engine), "{}", case.describe());
            }
        }
    }
}

#[test]
fn all_tokens_may_choose_one_expert_in_training() {
    let spec = base(|s| {
        s.shape.top_k = 1;
        s.router.bias = true;
    });
    for engine in engines() {
        let mut case = Case::random(&spec, 200, 5);
        let bias = case.weights.0.get_mut("router.bias").expect("it has one");
        bias.data = vec![0.0, 0.0, 99.0, 0.0, 0.0];
        assert!(agrees(&case, &engine));
    }
}

/// A layer with everything that backward does twice or in pieces.
fn busy() -> LayerSpec {
    let text = r#"
        shape = { model_dim = 45, hidden_dim = 70, experts = 5, top_k = 3 }
        precision = { weights = "bf16", activations = "bf16" }
        capacity = { mode = "factor", factor = 0.9 }
        experts = { bias = true }
        shared = [{ hidden_dim = 40, gate = "sigmoid" }]
    "#;
    LayerSpec::from_toml(text).unwrap_or_else(|e| panic!("{}", e.render("spec", false)))
}

fn bits(gradients: &Results) -> Vec<(&String, Vec<u64>)> {
    let each = |v: &Vec<f64>| v.iter().map(|v| v.to_bits()).collect();
    gradients.iter().map(|(name, v)| (name, each(v))).collect()
}

#[test]
fn recomputing_does_not_change_gradients() {
    for engine in engines() {
        let case = Case::random(&busy(), 300, 4);
        let run =
            |recompute| gradients(&case, &case.training_layer(&engine, recompute), &[false]).0;
        let want = run(Recompute::None);
        assert_eq!(bits(&run(Recompute::Hidden)), bits(&want));
        assert_eq!(bits(&run(Recompute::All)), bits(&want));
    }
}

#[test]
fn gradients_do_not_depend_on_threads() {
    let case = Case::random(&busy(), 500, 6);
    let run = |threads| {
        let options = EngineOptions {
            threads: Some(threads),
            poison: true,
            ..EngineOptions::default()
        };
        let engine = Engine::open("cpu", options).expect("a C compiler");
        gradients(
            &case,
            &case.training_layer(&engine, Recompute::None),
            &[false],
        )
        .0
    };
    let one = run(1);
    for threads in [2, 3, 8] {
        assert_eq!(bits(&run(threads)), bits(&one), "{threads} threads");
    }
}

#[test]
fn accumulated_gradients_are_sums() {
    let engine = engine();
    for tokens in [0, 150] {
        let case = Case::random(&busy(), tokens, 8);
        let layer = case.training_layer(&engine, Recompute::None);
        let once = gradients(&case, &layer, &[false]).0;
        let twice = gradients(&case, &layer, &[false, true]).0;
        for (name, gradient) in &once {
            let factor = if layer.gradient(name).is_ok() {
                2.0
            } else {
                1.0
            };
            let want: Vec<f64> = gradient.iter().map(|v| factor * v).collect();
            assert_eq!(twice[name], want, "{name}");
        }
    }
}
