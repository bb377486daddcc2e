//! What training draws, and selections beyond top-k: the same on every target.

use super::case::{Case, floats, host, ints, longs};
use super::compare::close;
use super::layers::engine as cpu;
use super::simulated::{SIMULATORS, exact, open, small};
use moesaic::reference::{self, Random, rng::Draw};
use moesaic::spec::*;
use moesaic::{Counters, DType, Engine, Output, Training};

pub const COUNTERS: Counters = Counters {
    seed: 1 << 40 | 7,
    step: 3,
    layer: 2,
    first_token: 11,
};

/// The counters as the reference takes them.
pub fn draw(counters: Counters) -> Draw {
    Draw {
        seed: counters.seed,
        step: counters.step,
        layer: counters.layer as u32,
        first_token: counters.first_token,
    }
}

/// The forward pass of a training call.
fn drawn(case: &Case, engine: &Engine, names: &[&str]) -> Output {
    let layer = engine.training_layer(&case.spec, &case.host_weights(), Training::default());
    let layer = layer.unwrap_or_else(|e| panic!("{} on {}: {e}", case.spec.name, engine.target()));
    let call = layer.forward_train(&case.input(), names, COUNTERS);
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
        case.input.draw = Some(draw(COUNTERS));
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

fn changed(change: impl FnOnce(&mut LayerSpec)) -> LayerSpec {
    let mut spec = small(25, 13, 9, 2);
    change(&mut spec);
    spec
}

/// Whole layers of every selection.
fn selections(target: &str) {
    let engine = open(target);
    let (temperature, load) = (0.75, 0.5);
    let specs = [
        changed(|s| s.router.token_mask = true),
        changed(|s| (s.router.active_k, s.shape.top_k) = (true, 5)),
        changed(|s| s.router.entropy = Some(Entropy { temperature, load })),
        changed(|s| {
            s.router.select = Select::ExpertChoice(1.5);
            (s.router.token_mask, s.shape.top_k) = (true, 9);
        }),
        changed(|s| {
            (s.router.kind, s.router.table_rows) = (RouterKind::Table, Some(11));
            (s.router.token_mask, s.router.active_k) = (true, true);
        }),
    ];
    for spec in specs {
        for tokens in [0, 1, 45] {
            Case::random(&spec, tokens, 5).check(&engine);
        }
    }
}

/// Every gradient of layers that draw, or select in their own way.
fn gradients(target: &str) {
    let engine = open(target);
    let specs = [
        changed(|s| {
            (s.router.jitter, s.router.input_dropout) = (0.2, 0.25);
            (s.router.input, s.router.bias) = (RouterInput::RmsScaled, true);
        }),
        changed(|s| (s.router.noise, s.router.noise_kind) = (0.7, NoiseKind::Learned)),
        changed(|s| {
            (s.router.jitter, s.router.random_second) = (0.1, true);
            s.router.renormalize = Renormalize::Sum;
            (s.router.noise, s.router.noise_kind) = (0.7, NoiseKind::Learned);
        }),
        changed(|s| (s.router.noise, s.router.select) = (3.0, Select::Sinkhorn(5))),
        changed(|s| {
            s.router.select = Select::ExpertChoice(1.5);
            (s.router.token_mask, s.shape.top_k) = (true, 9);
        }),
    ];
    for spec in specs {
        gradients_of(&spec, &engine);
    }
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

/// Trains once with what is drawn; holds losses and gradients against the
/// reference.
fn gradients_of(spec: &LayerSpec, engine: &Engine) {
    let target = engine.target();
    let mut case = Case::random(spec, 29, 5);
    case.input.draw = Some(draw(COUNTERS));
    let what = |name: &str| format!("{name} on {target} of {}", spec.to_toml());
    let layer = engine.training_layer(spec, &case.host_weights(), Training::default());
    let layer = layer.unwrap_or_else(|e| panic!("{}: {e}", what("the plan")));
    let dy = Random::new(9).vec(29 * spec.output_dim());
    let losses = reference::losses(spec, &case.weights, &case.input);
    let names: Vec<&str> = losses.keys().map(String::as_str).collect();
    let names = [&["y", "topk_ids"], &names[..]].concat();
    let forward = layer.forward_train(&case.input(), &names, COUNTERS);
    let (output, saved) = forward.unwrap_or_else(|e| panic!("{}: {e}", what("forward")));
    let expected = reference::gate(spec, &case.weights, &case.input).decision;
    assert_eq!(ints(&output, "topk_ids"), expected.ids, "{}", what("ids"));
    for (name, value) in &losses {
        close(&what(name), &floats(&output, name), &[*value], 2e-5);
    }
    let given = host(DType::F32, &[29, spec.output_dim()], &dy);
    let back = layer.backward(&saved, &given, false);
    let back = back.unwrap_or_else(|e| panic!("{}: {e}", what("backward")));
    let expected = reference::backward(spec, &case.weights, &case.input, &dy);
    close(&what("dx"), &floats(&back, "dx"), &expected.x, 2e-5);
    for (name, tensor) in &expected.weights {
        let found = layer.gradient(name);
        let found = found.unwrap_or_else(|e| panic!("{}: {e}", what(name)));
        let found: Vec<f64> = found.to_f32().into_iter().map(f64::from).collect();
        close(&what(name), &found, &tensor.data, 2e-5);
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
        let counters = Counters { step, ..COUNTERS };
        case.input.draw = Some(draw(counters));
        let run = layer.forward_train(&case.input(), &["y", "locations"], counters);
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
