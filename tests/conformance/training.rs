//! Gradients of whole layers against the f64 reference.

use super::Case;
use super::case::{floats, host, ints};
use super::layers::{engine, engines};
use moesaic::plan::{Recompute, Training};
use moesaic::reference::{self, Random};
use moesaic::spec::{LayerSpec, NoiseKind, Router, testing};
use moesaic::{Counters, DType, Engine, EngineOptions, HostTensor, Layer};
use std::collections::BTreeMap;

/// What a call gives back: `dx`, `grad.topk_weights`, and weights by name.
type Gradients = BTreeMap<String, Vec<f64>>;

const BASE: &str = "shape = { model_dim = 37, hidden_dim = 21, experts = 5, top_k = 2 }";

fn base(change: impl FnOnce(&mut LayerSpec)) -> LayerSpec {
    let mut spec = LayerSpec::from_toml(BASE).expect("a valid spec");
    change(&mut spec);
    spec
}

/// Without losses and without what draws random numbers, which have tests of
/// their own.
fn quiet(mut spec: LayerSpec) -> LayerSpec {
    let router = Router {
        jitter: 0.0,
        input_dropout: 0.0,
        noise: 0.0,
        noise_kind: NoiseKind::default(),
        random_second: false,
        ..spec.router
    };
    spec.router = router;
    spec.losses.clear();
    spec
}

fn dy(case: &Case) -> Vec<f64> {
    let spec = &case.spec;
    let values = Random::new(77).vec(case.input.tokens * spec.output_dim());
    let round = |v: f64| reference::round_to(spec.precision.activations, v);
    values.into_iter().map(round).collect()
}

fn host_dy(case: &Case) -> HostTensor<'static> {
    let shape = [case.input.tokens, case.spec.output_dim()];
    host(case.spec.precision.activations, &shape, &dy(case))
}

fn layer(case: &Case, engine: &Engine, recompute: Recompute) -> Layer {
    let weights = case.host_weights();
    engine
        .training_layer(&case.spec, &weights, Training { recompute })
        .unwrap_or_else(|e| panic!("{}: {e}", case.describe()))
}

/// Gradients after one backward pass per element of `accumulate`, and the ids.
fn gradients(case: &Case, layer: &Layer, accumulate: &[bool]) -> (Gradients, Vec<i32>) {
    let names = ["topk_ids"];
    let run = layer.forward_train(&case.input(), &names, Counters::default());
    let (output, saved) = run.unwrap_or_else(|e| panic!("{}: {e}", case.describe()));
    let mut all = Gradients::new();
    for &accumulate in accumulate {
        let given = layer.backward(&saved, &host_dy(case), accumulate);
        let given = given.unwrap_or_else(|e| panic!("{}: {e}", case.describe()));
        for name in ["dx", "grad.topk_weights"] {
            all.insert(name.to_string(), floats(&given, name));
        }
    }
    for (name, gradient) in layer.gradients().expect("a training layer") {
        all.insert(name, gradient.to_f32().into_iter().map(f64::from).collect());
    }
    (all, ints(&output, "topk_ids"))
}

fn expected(case: &Case) -> Gradients {
    let found = reference::backward(&case.spec, &case.weights, &case.input, &dy(case));
    let mut all = Gradients::new();
    all.insert("dx".to_string(), found.x);
    all.insert("grad.topk_weights".to_string(), found.topk_weights);
    all.extend(found.weights.into_iter().map(|(name, t)| (name, t.data)));
    all
}

/// Holds every gradient against the reference; `false` where the router's f32
/// scores chose another expert than f64 does, so that nothing can be compared.
fn agrees(case: &Case, engine: &Engine) -> bool {
    let (found, ids) = gradients(case, &layer(case, engine, Recompute::None), &[false]);
    let want = expected(case);
    if ids
        != reference::gate(&case.spec, &case.weights, &case.input)
            .decision
            .ids
    {
        return false;
    }
    let largest = want
        .values()
        .flatten()
        .fold(0.0, |most: f64, v| most.max(v.abs()));
    for (name, want) in &want {
        let what = || format!("gradient `{name}` of {}", case.describe());
        match found.get(name) {
            Some(found) => near(&what(), &case.spec, found, want, largest),
            None => assert!(want.iter().all(|v| *v == 0.0), "no {}", what()),
        }
    }
    true
}

/// Errors in root mean square, relative to the tensor's. Pre-activations,
/// hidden, dout, dgate, dup and drows are each rounded once to storage; a sum
/// that cancels keeps the errors of its terms.
fn near(what: &str, spec: &LayerSpec, found: &[f64], want: &[f64], largest: f64) {
    assert_eq!(found.len(), want.len(), "{what}: length");
    let rms = |values: &mut dyn Iterator<Item = f64>| {
        (values.map(|v| v * v).sum::<f64>() / want.len().max(1) as f64).sqrt()
    };
    let error = rms(&mut found.iter().zip(want).map(|(f, w)| f - w));
    let size = rms(&mut want.iter().copied());
    let rounding = spec.precision.activations.unit_roundoff();
    let tolerance = (5e-5 + 8.0 * rounding) * size + (1e-6 + rounding) * largest;
    assert!(
        error <= tolerance,
        "{what}\nerror {error:e} of {size:e} is more than {tolerance:e}"
    );
}

#[test]
fn random_specs_have_the_gradients_of_the_reference() {
    let widest = engine().target();
    for engine in engines() {
        let seeds = if engine.target() == widest {
            0..24
        } else {
            200..204
        };
        let count = seeds.end - seeds.start;
        let mut compared = 0;
        for seed in seeds {
            let spec = quiet(testing::sample(seed));
            let tokens = [1, 7, 33, 100][seed as usize % 4];
            compared += i32::from(agrees(&Case::random(&spec, tokens, seed), &engine));
        }
        assert!(compared as u64 * 10 >= count * 9, "{compared} of {count}");
    }
}

#[test]
fn odd_sizes_have_the_gradients_of_the_reference() {
    let engine = engine();
    let shapes = [(1, 1, 1, 1), (3, 5, 2, 1), (37, 21, 5, 5), (129, 130, 3, 2)];
    for (d, h, e, k) in shapes {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
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

fn bits(gradients: &Gradients) -> Vec<(&String, Vec<u64>)> {
    let each = |v: &Vec<f64>| v.iter().map(|v| v.to_bits()).collect();
    gradients.iter().map(|(name, v)| (name, each(v))).collect()
}

#[test]
fn recomputing_does_not_change_gradients() {
    for engine in engines() {
        let case = Case::random(&busy(), 300, 4);
        let run = |recompute| gradients(&case, &layer(&case, &engine, recompute), &[false]).0;
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
        gradients(&case, &layer(&case, &engine, Recompute::None), &[false]).0
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
        let layer = layer(&case, &engine, Recompute::None);
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
