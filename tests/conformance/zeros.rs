//! Zeros where zeros are due, in every capacity mode: no tokens, no rows, one
//! expert, all experts, experts that nobody chose.

use super::Case;
use super::layers::engine;
use super::trained::Results;
use moesaic::reference::Random;
use moesaic::spec::LayerSpec;
use moesaic::{Engine, Layer, Recompute};

/// The last two leave no expert any row.
const MODES: [&str; 9] = [
    "mode = \"dropless\"",
    "mode = \"factor\"\nfactor = 1.0",
    "mode = \"factor\"\nfactor = 0.0",
    "mode = \"factor\"\nfactor = -0.5",
    "mode = \"fixed\"\nrows = 1",
    "mode = \"max-count\"",
    "mode = \"bounded\"\nfactor = 0.5\nrenormalize_after_drop = true",
    "mode = \"factor\"\nfactor = 0.01",
    "mode = \"bounded\"\nfactor = 0.01\nrenormalize_after_drop = true",
];

fn spec(experts: usize, top_k: usize, mode: &str) -> LayerSpec {
    let toml = format!(
        "shape = {{ model_dim = 13, hidden_dim = 11, experts = {experts}, top_k = {top_k} }}\n\
         [router]\nbias = true\n[experts]\nbias = true\n[capacity]\n{mode}\n"
    );
    LayerSpec::from_toml(&toml).unwrap_or_else(|e| panic!("{}", e.render("spec", false)))
}

fn run(case: &Case, layer: &Layer, dy: &[f64]) -> Results {
    case.train(layer, dy, &[false]).0
}

fn check(case: &Case, engine: &Engine) {
    let dy = Random::new(3).vec(case.input.tokens * 13);
    let dy: Vec<f64> = dy.iter().map(|&v| f64::from(v as f32)).collect();
    let found = run(case, &case.training_layer(engine, Recompute::None), &dy);
    for (name, want) in case.trained(&dy) {
        let found = &found[&name];
        assert_eq!(found.len(), want.len(), "{name}");
        for (i, (found, want)) in found.iter().zip(&want).enumerate() {
            let what = format!("{name}[{i}] of {}", case.describe());
            assert!(found.is_finite(), "{what} is {found}");
            assert!(*want != 0.0 || *found == 0.0, "{what} is {found}, not 0");
        }
    }
}

/// Every token to expert 2, where there is a choice.
fn case(spec: &LayerSpec, tokens: usize) -> Case {
    let mut case = Case::random(spec, tokens, 4);
    let bias = case.weights.0.get_mut("router.bias").expect("it has one");
    if spec.shape.top_k < spec.shape.experts {
        bias.data[2] = 99.0;
    }
    case
}

#[test]
fn zeros_are_exact_in_every_capacity_mode() {
    let engine = engine();
    for mode in MODES {
        for (experts, top_k) in [(1, 1), (5, 5), (5, 1)] {
            let spec = spec(experts, top_k, mode);
            for tokens in [0, 9] {
                check(&case(&spec, tokens), &engine);
            }
        }
    }
}

#[test]
fn nothing_is_left_where_nobody_gets_a_row() {
    let engine = engine();
    for mode in &MODES[7..] {
        let case = case(&spec(5, 1, mode), 9);
        let dy = vec![1.0; 9 * 13];
        let all = run(&case, &case.training_layer(&engine, Recompute::None), &dy);
        let none = |(name, values): (&String, &Vec<f64>)| {
            assert!(values.iter().all(|v| *v == 0.0), "{name} under {mode}");
        };
        all.iter().for_each(none);
    }
}

#[test]
fn ten_runs_give_the_same_bytes() {
    let engine = engine();
    let case = Case::random(&spec(5, 3, MODES[6]), 130, 5);
    let dy = Random::new(6).vec(130 * 13);
    let bits = |all: &Results| -> Vec<u64> {
        let values = all.values().flatten();
        values.map(|v| v.to_bits()).collect()
    };
    let layer = case.training_layer(&engine, Recompute::None);
    let first = bits(&run(&case, &layer, &dy));
    for _ in 1..10 {
        assert_eq!(bits(&run(&case, &layer, &dy)), first);
    }
}
