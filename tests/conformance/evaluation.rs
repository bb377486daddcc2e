//! Two calls of one layer: training draws and keeps, evaluation does neither and
//! has its own capacity. And the call that only decides where tokens go.

use super::case::{Case, host, longs};
use super::cases::small;
use super::layers::{engine as cpu, engines};
use super::simulated::open;
use super::trained::RNG_KEY;
use moesaic::spec::*;
use moesaic::{
    CallInput, DType, Engine, EngineError, Input, Layer, Output, RawCall, Recompute, RngKey, Tensor,
};
use moesaic_harness::thorough::in_turns;
use std::collections::BTreeSet;

fn changed(change: impl FnOnce(&mut LayerSpec)) -> LayerSpec {
    let mut spec = small(25, 13, 9, 2);
    change(&mut spec);
    spec
}

/// Layers of which training does something else than evaluation, in the
/// router, in placement or in both.
fn two_faced() -> Vec<LayerSpec> {
    let limited = |spec: &mut LayerSpec| {
        spec.capacity.mode = CapacityMode::Factor;
        (spec.capacity.factor, spec.capacity.eval_factor) = (0.6, Some(0.9));
    };
    let noisy = |kind| changed(|s| (s.router.noise, s.router.noise_kind) = (3.0, kind));
    let mut specs = vec![
        changed(|s| (s.router.jitter, s.router.input_dropout) = (0.2, 0.25)),
        changed(|s| s.router.random_second = true),
        changed(|s| (s.router.noise, s.router.select) = (3.0, Select::Sinkhorn(5))),
        changed(|s| {
            limited(s);
            s.capacity.order = CapacityOrder::Random;
        }),
        changed(|s| {
            limited(s);
            (s.router.random_second, s.router.jitter) = (true, 0.5);
            (s.router.noise, s.router.noise_kind) = (2.0, NoiseKind::Learned);
            s.capacity.renormalize_after_drop = true;
            s.capacity.mode = CapacityMode::Bounded;
            s.shared = vec![SharedExpert {
                hidden_dim: 7,
                gate: SharedGate::Sigmoid,
                bias: None,
                clamp: None,
                activation: None,
            }];
            s.losses = vec![Loss {
                kind: LossKind::Global,
                coefficient: 0.1,
                sequence_length: None,
            }];
        }),
        changed(|s| {
            limited(s);
            s.capacity.order = CapacityOrder::BatchPrioritized;
            (s.router.noise, s.router.noise_kind) = (2.0, NoiseKind::Gaussian);
        }),
    ];
    use NoiseKind::{Gaussian, Gumbel, GumbelSecond, Learned};
    specs.extend([Gaussian, Learned, Gumbel, GumbelSecond].map(noisy));
    specs
}

/// Returns the results of every forward pass.
fn all(case: &Case, layer: &Layer) -> Output {
    let output = layer.forward(case.input().reading(&case.outputs()));
    output.unwrap_or_else(|e| panic!("{}: {e}", case.describe()))
}

/// A training layer evaluates to the bit as one for inference, and as the
/// reference does; also between a training call and its backward pass.
fn evaluates(case: &Case, engine: &Engine, recompute: Recompute) {
    let trained = case.training_layer(engine, recompute);
    case.check_layer(&trained);
    let (want, found) = (all(case, &case.layer(engine)), all(case, &trained));
    for name in case.outputs() {
        let rows = meaningful(case, &want, name);
        let (want, found) = (want.get(name).unwrap(), found.get(name).unwrap());
        assert_eq!(want.data[..rows], found.data[..rows], "{}", case.what(name));
    }
}

/// Bytes of an output that were written: rows past the last are not.
fn meaningful(case: &Case, output: &Output, name: &str) -> usize {
    match name {
        "row_slots" => 4 * longs(output, "offsets")[case.spec.shape.experts] as usize,
        name => output.get(name).unwrap().data.len(),
    }
}

const MODES: [Recompute; 3] = [Recompute::None, Recompute::Hidden, Recompute::All];

fn every_kind_evaluates(target: &str) {
    let engine = open(target);
    for (i, spec) in two_faced().into_iter().enumerate() {
        if let Err(problems) = spec.validate() {
            panic!("{problems:?}");
        }
        for tokens in [0, 45] {
            evaluates(&Case::random(&spec, tokens, 5), &engine, MODES[i % 3]);
        }
    }
}

/// Otherwise the tests above could not fail.
#[test]
fn training_does_something_else() {
    for spec in two_faced() {
        let case = Case::random(&spec, 45, 5);
        let layer = case.training_layer(&cpu(), Recompute::None);
        let evaluated = layer.forward(&case.input()).unwrap();
        let mut input = case.input();
        global_inputs(&mut input, &[1; 9], 9);
        let (trained, _) = layer.forward_train(input.reading(&["y"]), RNG_KEY).unwrap();
        assert_ne!(trained.y(), evaluated.y(), "{}", case.describe());
    }
}

/// Adds the inputs of a loss of kind `global`.
fn global_inputs(input: &mut Input<'_>, counts: &[i64], tokens: i64) {
    let counts = Tensor::owned(&[counts.len()], counts.to_vec());
    input.insert("global_counts", counts);
    input.insert("global_tokens", Tensor::owned(&[1], vec![tokens]));
}

macro_rules! on {
    ($check:ident: $($name:ident on $target:literal),* $(,)?) => {$(
        #[test]
        fn $name() {
            $check($target);
        }
    )*};
}

/// One set of kernels for every factor, in training too.
fn factors_change_per_call(target: &str) {
    let engine = open(target);
    let orders = [CapacityOrder::Probability, CapacityOrder::TokenMajor];
    for (i, mode) in [CapacityMode::Factor, CapacityMode::Bounded]
        .into_iter()
        .enumerate()
    {
        let spec = changed(|s| {
            (s.capacity.mode, s.capacity.order) = (mode, orders[i]);
            (s.capacity.factor, s.capacity.align) = (1.25, 1 + 3 * i);
            s.capacity.eval_factor = Some(2.0);
        });
        let mut case = Case::random(&spec, 61, 5);
        let layer = case.training_layer(&engine, Recompute::All);
        let compiled = engine.stats().compiled;
        let mut capacities = BTreeSet::new();
        for factor in [
            None,
            Some(0.3),
            Some(1.0),
            Some(0.0),
            Some(-0.5),
            Some(-9.0),
            Some(9.0),
        ] {
            case.input.capacity_factor = factor;
            case.check_layer(&layer);
            let output = layer.route(case.input().reading(&["capacity"])).unwrap();
            capacities.extend(longs(&output, "capacity"));
            case.check_gradients(&layer);
        }
        assert!(capacities.len() > 4, "{capacities:?}");
        assert_eq!(engine.stats().compiled, compiled);
    }
}

#[test]
fn a_factor_that_cannot_be_is_an_error() {
    let engine = cpu();
    let refused = |case: &Case, factor: f64, words: &str| {
        let layer = case.training_layer(&engine, Recompute::None);
        let input = case.input().with_capacity_factor(factor);
        let results = [
            layer.forward(&input).map(drop),
            layer.route(input.reading(&["counts"])).map(drop),
            layer
                .forward_train(input.reading(&["y"]), RNG_KEY)
                .map(drop),
        ];
        for result in results {
            let error = result.expect_err("no such factor");
            assert!(matches!(error, EngineError::Capacity { .. }), "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
    };
    let modes = [
        (CapacityMode::Dropless, "\"dropless\" has no factor"),
        (CapacityMode::Fixed, "\"fixed\" has no factor"),
        (
            CapacityMode::MaxCount,
            "modes \"factor\" and \"bounded\" have one",
        ),
    ];
    for (mode, words) in modes {
        let spec = changed(|s| {
            s.capacity.mode = mode;
            s.capacity.rows = (mode == CapacityMode::Fixed).then_some(3);
        });
        refused(&Case::random(&spec, 5, 1), 1.0, words);
    }
    let spec = changed(|s| s.capacity.mode = CapacityMode::Factor);
    let case = Case::random(&spec, 5, 1);
    for factor in [f64::NAN, f64::INFINITY, -1e300] {
        refused(&case, factor, "it must be between");
    }
}

#[test]
fn evaluation_has_no_losses() {
    let spec = changed(|s| {
        s.losses = vec![Loss {
            kind: LossKind::Z,
            coefficient: 0.1,
            sequence_length: None,
        }];
    });
    let case = Case::random(&spec, 5, 1);
    let trained = case.training_layer(&cpu(), Recompute::None);
    let error = trained
        .forward(case.input().reading(&["loss.z"]))
        .unwrap_err();
    assert!(
        matches!(error, EngineError::TrainingOutput { .. }),
        "{error}"
    );
    assert!(error.to_string().contains("ask `forward_train`"), "{error}");
    for layer in [case.layer(&cpu()), trained] {
        for name in ["dx", "loss.switch", "gate_pre"] {
            let error = layer.forward(case.input().reading(&[name])).unwrap_err();
            assert!(
                matches!(error, EngineError::NoOutput { .. }),
                "{name}: {error}"
            );
        }
    }
}

/// The results of a routing call that a layer has.
fn decisions(layer: &Layer) -> Vec<&str> {
    let names = [
        "topk_ids",
        "topk_weights",
        "counts",
        "locations",
        "capacity",
        "overflow",
    ];
    let known = |name: &&str| layer.plan().tensor(name).is_some();
    names.into_iter().filter(known).collect()
}

/// Routing alone decides what the whole call decides, and leaves alone what
/// another call left for backward.
fn routes(target: &str) {
    let engine = open(target);
    for spec in two_faced() {
        let case = Case::random(&spec, 45, 5);
        let layer = case.training_layer(&engine, Recompute::None);
        let (input, what) = (case.input(), case.describe());
        let names = decisions(&layer);
        let whole = layer.forward(input.reading(&names)).unwrap();
        let routed = layer.route(input.reading(&names)).unwrap();
        assert_eq!(routed.into_tensors(), whole.into_tensors(), "{what}");
        let routed = layer
            .route(input.reading(&names).in_training(RNG_KEY))
            .unwrap();
        let mut trained = input.clone();
        global_inputs(&mut trained, &longs(&routed, "counts"), 45);
        let (whole, saved) = layer
            .forward_train(trained.reading(&names), RNG_KEY)
            .unwrap();
        assert_eq!(routed.into_tensors(), whole.into_tensors(), "{what}");
        let dy = host(DType::F32, &[45, 25], &case.dy(3));
        let undisturbed = layer.backward(&saved, &dy, false).unwrap();
        let other = Case::random(&spec, 31, 6).input();
        layer.forward(&other).unwrap();
        layer
            .route(other.reading(&names).in_training(RngKey::default()))
            .unwrap();
        let disturbed = layer.backward(&saved, &dy, false).unwrap();
        assert_eq!(
            undisturbed.into_tensors(),
            disturbed.into_tensors(),
            "{what}"
        );
    }
}

#[test]
fn routing_needs_a_layer_that_trains_only_to_draw() {
    let case = Case::random(&changed(|s| s.router.jitter = 0.1), 5, 1);
    let layer = case.layer(&cpu());
    layer
        .route(case.input().reading(&["counts"]))
        .expect("it evaluates");
    let error = layer.route(case.input().reading(&["counts"]).in_training(RNG_KEY));
    assert!(matches!(error, Err(EngineError::NotTraining)));
    let error = layer.route(case.input().reading(&["y"])).unwrap_err();
    assert!(matches!(error, EngineError::NoOutput { .. }), "{error}");
}

/// Calls on the caller's memory are the same four.
#[test]
fn raw_calls_evaluate_train_and_route() {
    let engine = cpu();
    let spec = changed(|s| {
        (s.router.noise, s.capacity.mode) = (3.0, CapacityMode::Factor);
        (s.capacity.factor, s.capacity.eval_factor) = (0.6, Some(1.2));
    });
    let case = Case::random(&spec, 21, 5);
    let layer = case.training_layer(&engine, Recompute::None);
    let device = engine.device();
    let input = case.input().with_capacity_factor(0.9);
    let row_bytes = input.tensors["x"].data.len();
    let [x, y, counts] = [row_bytes, row_bytes, 8 * 9].map(|bytes| device.alloc(bytes).unwrap());
    device.upload(&input.tensors["x"].data, &x, 0).unwrap();
    let tensors = [("x", x.ptr()), ("y", y.ptr()), ("counts", counts.ptr())];
    // SAFETY: the buffers hold the tensors of 21 tokens, and outlive the calls.
    let call = unsafe { RawCall::new(21, &tensors) }.with_capacity_factor(input.capacity_factor);
    let results = || {
        let mut found = [vec![0; row_bytes], vec![0; 8 * 9]];
        device.download(&y, 0, &mut found[0]).unwrap();
        device.download(&counts, 0, &mut found[1]).unwrap();
        device.upload(&vec![0; row_bytes], &y, 0).unwrap();
        found
    };
    let expected = |output: Output| {
        let bytes = |name| output.get(name).map(|tensor| tensor.data.to_vec());
        [
            bytes("y").unwrap_or(vec![0; row_bytes]),
            bytes("counts").unwrap(),
        ]
    };
    let (all, routed) = (["y", "counts"], ["counts"]);
    results();
    {
        layer.forward(call).unwrap();
        let evaluated = layer.forward(input.reading(&all)).unwrap();
        assert_eq!(results(), expected(evaluated));
        layer.route(call).unwrap();
        assert_eq!(
            results(),
            expected(layer.route(input.reading(&routed)).unwrap())
        );
        layer
            .route(CallInput::from(call).in_training(RNG_KEY))
            .unwrap();
        let drawn = layer
            .route(input.reading(&routed).in_training(RNG_KEY))
            .unwrap();
        assert_eq!(results(), expected(drawn));
        drop(layer.forward_train(call, RNG_KEY).unwrap());
        let (trained, _) = layer.forward_train(input.reading(&all), RNG_KEY).unwrap();
        assert_eq!(results(), expected(trained));
        // SAFETY: it names no memory.
        let nothing = unsafe { RawCall::new(0, &[]) };
        let error = layer.route(nothing).unwrap_err();
        assert_eq!(
            error.to_string(),
            "input `x`: has no address: add it to the call's tensors"
        );
    }
}

/// Decisions come from outside: tokens are not read.
#[test]
fn routing_of_an_external_router_needs_no_tokens() {
    let case = Case::random(&changed(|s| s.router.kind = RouterKind::External), 33, 1);
    let layer = case.layer(&cpu());
    let mut input = case.input();
    input.tensors.remove("x");
    let names = ["counts", "locations", "offsets"];
    let routed = layer.route(input.reading(&names)).unwrap();
    let whole = layer.forward(case.input().reading(&names)).unwrap();
    assert_eq!(routed.into_tensors(), whole.into_tensors());
}

on! { factors_change_per_call:
    cpu_portable_changes_factors on "cpu:portable",
    sm_80_changes_factors on "sim:sm_80",
    sm_90a_changes_factors on "sim:sm_90a",
    gfx942_changes_factors on "sim:gfx942",
}

on! { routes:
    cpu_portable_routes on "cpu:portable",
    sm_80_routes on "sim:sm_80",
    gfx942_routes on "sim:gfx942",
}

on! { every_kind_evaluates:
    cpu_portable_evaluates on "cpu:portable",
    sm_80_evaluates on "sim:sm_80",
    sm_90a_evaluates on "sim:sm_90a",
    gfx942_evaluates on "sim:gfx942",
}

#[test]
fn random_layers_evaluate_alike_whether_they_train_or_not() {
    let widest = cpu().target();
    for engine in engines() {
        let seeds = if engine.target() == widest {
            300..305
        } else {
            340..342
        };
        for seed in in_turns(0, seeds) {
            let tokens = [1, 7, 33, 100][seed as usize % 4];
            let case = Case::random(&testing::sample(seed), tokens, seed);
            evaluates(&case, &engine, MODES[seed as usize % 3]);
        }
    }
}

/// Where the caller decides, routing gives the decision with what follows from it.
#[test]
fn routing_of_an_external_router_has_its_weights() {
    let spec = changed(|s| s.router.kind = RouterKind::External);
    let case = Case::random(&spec, 9, 1);
    let layer = case.layer(&cpu());
    let names = ["topk_ids", "topk_weights", "counts"];
    let routed = layer.route(case.input().reading(&names)).unwrap();
    for name in &names[..2] {
        let given = &case.input().tensors[*name];
        assert_eq!(routed.get(name).unwrap().data, given.data, "{name}");
    }
    let mut ids_alone = case.input();
    ids_alone.tensors.remove("topk_weights");
    let of_ids = layer.route(ids_alone.reading(&["counts"])).unwrap();
    assert_eq!(of_ids.get("counts"), routed.get("counts"));
    let error = layer
        .route(ids_alone.reading(&names))
        .map(drop)
        .unwrap_err();
    assert!(
        error.to_string().contains("`topk_weights`: is missing"),
        "{error}"
    );
}
