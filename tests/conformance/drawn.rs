//! The random numbers of training, and selections beyond top-k: the same on
//! every target.

use super::case::{Case, floats, ints, longs};
use super::cases::{changed, drawing, exact, selecting, small};
use super::layers::engine as cpu;
use super::sampled::gradients_of;
use super::simulated::{SIMULATORS, open};
use super::trained::{RNG_KEY, draw};
use moesaic::reference;
use moesaic::spec::*;
use moesaic::{Engine, Output, RngKey, Training};

/// The forward pass of a training call.
fn drawn(case: &Case, engine: &Engine, names: &[&str]) -> Output {
    let layer = engine.training_layer(&case.spec, &case.host_weights(), Training::default());
    let layer = layer.unwrap_or_else(|e| panic!("{} on {}: {e}", case.spec.name, engine.target()));
    let call = layer.forward_train(case.input().reading(names), RNG_KEY);
    call.unwrap_or_else(|e| panic!("{} on {}: {e}", case.spec.name, engine.target()))
        .0
}

/// Logits of integers are exact, so that noise shows its bits.
fn same_noise(target: &str) {
    let (cpu, engine) = (cpu(), open(target));
    let kinds = [
        (NoiseKind::Gaussian, 9.7),
        (NoiseKind::Gumbel, 0.8),
        (NoiseKind::GumbelSecond, 2.0),
    ];
    for (kind, noise) in kinds {
        let mut spec = small(17, 9, 37, 2);
        (spec.router.noise, spec.router.noise_kind) = (noise, kind);
        spec.router.random_second = true;
        let mut case = exact(&spec, 70, 3);
        case.input.draw = Some(draw(RNG_KEY));
        let names = ["router.logits", "topk_ids", "locations", "counts"];
        let expected = reference::gate(&spec, &case.weights, &case.input);
        let [ours, theirs] = [&cpu, &engine].map(|engine| drawn(&case, engine, &names));
        for output in [&ours, &theirs] {
            let what = format!("{kind:?} on {target}");
            let logits: Vec<f64> = expected.logits.iter().flatten().copied().collect();
            let logits: Vec<f64> = logits.iter().map(|&z| f64::from(z as f32)).collect();
            assert_eq!(floats(output, "router.logits"), logits, "{what}");
            assert_eq!(ints(output, "topk_ids"), expected.decision.ids, "{what}");
        }
        assert_eq!(ints(&ours, "locations"), ints(&theirs, "locations"));
        assert_eq!(longs(&ours, "counts"), longs(&theirs, "counts"));
    }
}

/// Whole layers of every selection.
fn selections(target: &str) {
    let engine = open(target);
    for spec in selecting() {
        for tokens in [0, 1, 45] {
            Case::random(&spec, tokens, 5).check(&engine);
        }
    }
}

/// Every gradient of layers that draw, or select in their own way.
fn gradients(target: &str) {
    let engine = open(target);
    let specs = drawing();
    specs.iter().for_each(|spec| gradients_of(spec, &engine));
}

/// The load loss of learned noise, whose scale is in what it sums: where some
/// experts are left out, and where none is.
fn learned_load(target: &str) {
    let engine = open(target);
    for top_k in [2, 9] {
        let spec = changed(|s| {
            (s.router.noise, s.router.noise_kind) = (0.7, NoiseKind::Learned);
            (s.router.token_mask, s.shape.top_k) = (true, top_k);
            let loss = |kind| Loss {
                kind,
                coefficient: 0.5,
                sequence_length: None,
            };
            s.losses = vec![loss(LossKind::ImportanceLoadLogits), loss(LossKind::Z)];
        });
        gradients_of(&spec, &engine);
    }
}

macro_rules! served_on {
    ($($name:ident: $target:literal),* $(,)?) => {$(
        #[test]
        fn $name() {
            selections($target);
        }
    )*};
}

served_on! {
    cpu_serves_every_selection: "cpu:portable",
    sm_80_serves_every_selection: "sim:sm_80",
    sm_90a_serves_every_selection: "sim:sm_90a",
    gfx942_serves_every_selection: "sim:gfx942",
}

#[test]
fn the_load_of_learned_noise_is_the_references() {
    let host = cpu().target().to_string();
    for target in [&*host, "cpu:portable"].into_iter().chain(SIMULATORS) {
        learned_load(target);
    }
}

/// Tokens that find no room are others in each call, and the same everywhere.
fn random_order(target: &str) {
    let engine = open(target);
    let spec = changed(|s| {
        (s.router.kind, s.capacity.mode) = (RouterKind::External, CapacityMode::Factor);
        (s.capacity.factor, s.capacity.order) = (0.5, CapacityOrder::Random);
    });
    let mut case = Case::random(&spec, 130, 5);
    let layer = engine.training_layer(&spec, &case.host_weights(), Training::default());
    let layer = layer.unwrap_or_else(|e| panic!("{target}: {e}"));
    let mut seen = Vec::new();
    for step in [3, 4] {
        let rng_key = RngKey { step, ..RNG_KEY };
        case.input.draw = Some(draw(rng_key));
        let run = layer.forward_train(case.input().reading(&["y", "locations"]), rng_key);
        let output = run.unwrap_or_else(|e| panic!("{target}: {e}")).0;
        let decision = reference::gate(&spec, &case.weights, &case.input).decision;
        let expected = reference::scan(&spec, &decision, &case.input);
        assert!(expected.locations.contains(&-1), "the test drops nothing");
        assert_eq!(ints(&output, "locations"), expected.locations, "{target}");
        seen.push(expected.locations);
    }
    assert_ne!(seen[0], seen[1]);
    gradients_of(&spec, &engine);
}

#[test]
fn random_placement_goes_by_the_counters() {
    let host = cpu().target().to_string();
    for target in [&*host, "cpu:portable"].into_iter().chain(SIMULATORS) {
        random_order(target);
    }
}

macro_rules! trained_on {
    ($($module:ident: $target:literal),* $(,)?) => {$(
        mod $module {
            #[test]
            fn noise_has_the_same_bits() {
                super::same_noise($target);
            }

            #[test]
            fn gradients_are_the_references() {
                super::gradients($target);
            }
        }
    )*};
}

trained_on! {
    cpu_portable: "cpu:portable",
    gfx942: "sim:gfx942",
}
