//! Handles of one layer run at the same time, and slices of the caller give what `forward` gives.

use super::case::Case;
use super::cases::small;
use super::layers::engine as cpu;
use super::mesh::{layer_on, mesh, on_ranks, part, shares};
use super::simulated::open;
use super::trained::RNG_KEY;
use moesaic::spec::{LayerSpec, RouterKind};
use moesaic::trace::{Activity, Recorder};
use moesaic::{DType, Engine, EngineError, Input, Layer, RngKey, Strategy, Tensor, Training};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

const THREADS: usize = 4;

/// Lets each call's first launch begin once all threads have come that far.
#[derive(Default)]
struct Together {
    arrived: Mutex<usize>,
    all: Condvar,
}

impl Recorder for Together {
    fn begins(&self, _: &Activity) {
        let mut arrived = self.arrived.lock().unwrap();
        *arrived += 1;
        self.all.notify_all();
        let waited = self
            .all
            .wait_timeout_while(arrived, Duration::from_secs(60), |n| *n < THREADS);
        assert!(!waited.unwrap().1.timed_out(), "calls wait for one another");
    }

    fn ended(&self, _: &Activity, _: Instant, _: Instant) {}
}

fn rows(case: &Case) -> Vec<f32> {
    case.input.x.iter().map(|v| *v as f32).collect()
}

#[test]
fn handles_run_at_the_same_time_and_give_the_same() {
    let spec = small(25, 13, 9, 2);
    let case = Case::random(&spec, 40, 3);
    let mut layer = case.layer(&cpu());
    let expected = layer.forward(&case.input()).unwrap().y().clone();
    layer.record(Some(Arc::new(Together::default())));
    let handles: Vec<Layer> = (0..THREADS).map(|_| layer.handle()).collect();
    std::thread::scope(|scope| {
        for handle in &handles {
            let (case, expected) = (&case, &expected);
            scope.spawn(move || {
                for _ in 0..3 {
                    let output = handle.forward(&case.input()).unwrap();
                    assert_eq!(output.y(), expected);
                }
            });
        }
    });
}

#[test]
fn a_weight_changes_for_all_handles() {
    let spec = small(25, 13, 9, 2);
    let case = Case::random(&spec, 7, 3);
    let layer = case.layer(&cpu());
    let handle = layer.handle();
    let before = handle.forward(&case.input()).unwrap().y().clone();
    let down = Tensor::zeros(DType::F32, &[9, 25, 13]);
    layer.set_weight("experts.down.weight", &down).unwrap();
    let after = handle.forward(&case.input()).unwrap().y().clone();
    assert_ne!(before, after);
    assert!(after.to_f32().iter().all(|v| *v == 0.0));
}

#[test]
fn a_training_handle_has_gradients_of_its_own() {
    let spec = small(25, 13, 9, 2);
    let case = Case::random(&spec, 7, 3);
    let layer = cpu()
        .training_layer(&spec, &case.host_weights(), Training::default())
        .unwrap();
    let handle = layer.handle();
    let (_, saved) = layer
        .forward_train(&case.input(), RngKey::default())
        .unwrap();
    let dy = Tensor::owned(&[7, 25], vec![1.0f32; 7 * 25]);
    let error = handle.backward(&saved, &dy, false).unwrap_err();
    assert!(matches!(error, EngineError::ForeignSaved), "{error}");
    layer.backward(&saved, &dy, false).unwrap();
    let sum = |layer: &Layer| {
        let gradient = layer.gradient("experts.down.weight").unwrap();
        gradient.to_f32().iter().map(|v| v.abs()).sum::<f32>()
    };
    assert!(sum(&layer) > 0.0);
    assert_eq!(sum(&handle), 0.0);
}

/// In place on a CPU, by copies on a simulator of a GPU.
fn into_equals_forward(engine: &Engine) {
    let spec = small(25, 13, 9, 2);
    for tokens in [40, 1, 0] {
        let case = Case::random(&spec, tokens, 3);
        let layer = case.layer(engine);
        let expected = layer.forward(&case.input()).unwrap().y().to_f32();
        let (x, mut y) = (rows(&case), vec![f32::NAN; tokens * 25]);
        layer.forward_into(&x, &mut y).unwrap();
        assert_eq!(y, expected);
        y.fill(f32::NAN);
        layer.forward_into(&case.input(), &mut y).unwrap();
        assert_eq!(y, expected);
    }
}

#[test]
fn slices_get_what_forward_gives() {
    into_equals_forward(&cpu());
    into_equals_forward(&open("sim:gfx942"));
}

/// A decision of the caller stays as the caller made it, although kernels rescale it.
#[test]
fn inputs_are_left_alone() {
    let mut spec = small(25, 13, 9, 2);
    spec.router.kind = RouterKind::External;
    spec.capacity.mode = moesaic::spec::CapacityMode::Factor;
    spec.capacity.factor = 0.5;
    spec.capacity.renormalize_after_drop = true;
    let case = Case::random(&spec, 40, 3);
    let layer = case.layer(&cpu());
    let (x, (ids, weights)) = (rows(&case), case.input.routing.clone().unwrap());
    let weights: Vec<f32> = weights.iter().map(|w| *w as f32).collect();
    let given = weights.clone();
    let input = Input::new(40, &x).with_routing(2, &ids, &weights);
    let mut y = vec![0.0f32; 40 * 25];
    layer.forward_into(&input, &mut y).unwrap();
    assert_eq!(y, layer.forward(&input).unwrap().y().to_f32());
    assert_eq!(weights, given);
}

#[test]
fn slices_that_do_not_fit_are_refused() {
    let spec = small(25, 13, 9, 2);
    let layer = Case::random(&spec, 4, 3).layer(&cpu());
    let (x, mut y) = (vec![0.0f32; 100], vec![0.0f32; 99]);
    let said = |result: Result<(), EngineError>| result.unwrap_err().to_string();
    assert_eq!(
        said(layer.forward_into(&x, &mut y)),
        "output `y`: has 99 elements of f32, expected 100 of f32: a row for each token of the call, \
         here 4"
    );
    assert_eq!(
        said(layer.forward_into(&x[1..], &mut y)),
        "input `x`: has 99 elements of f32, expected rows of 25 of f32"
    );
    assert_eq!(
        said(layer.forward_into(&[0i32; 100], &mut y)),
        "input `x`: has 100 elements of i32, expected rows of 25 of f32"
    );
    let external = LayerSpec {
        router: moesaic::spec::Router {
            kind: RouterKind::External,
            ..spec.router.clone()
        },
        ..spec
    };
    let layer = Case::random(&external, 4, 3).layer(&cpu());
    let error = said(layer.forward_into(&x, &mut [0.0f32; 100]));
    assert!(error.contains("pass an `Input`"), "{error}");
}

/// Over ranks a handle gives the bytes of its layer, keeps states and gradients of its own, and
/// follows a strategy that the ranks set on it; a slice gets what `forward` gives.
#[test]
fn handles_and_slices_over_ranks_give_the_same() {
    let case = Case::random(&small(25, 13, 8, 2), 22, 3);
    on_ranks(&cpu(), mesh(2, 1, 1), |mesh| {
        let layer = layer_on(&cpu(), mesh, &case, Some(Training::default()));
        let strategy: Strategy = "overlap_degree=2".parse().unwrap();
        layer.set_strategy(strategy).unwrap();
        let own = part(&case, &shares(22, 2)[mesh.rank()]);
        let expected = layer.forward(&own.input()).unwrap().y().clone();
        let handle = layer.handle();
        assert_eq!(handle.strategy(), Strategy::default());
        for _ in 0..2 {
            assert_eq!(handle.forward(&own.input()).unwrap().y(), &expected);
            let mut y = vec![0.0f32; expected.elements()];
            handle.forward_into(&own.input(), &mut y).unwrap();
            assert_eq!(y, expected.to_f32());
            handle.set_strategy(strategy).unwrap();
        }
        let dy = Tensor::owned(&expected.shape, vec![1.0f32; expected.elements()]);
        let (_, saved) = handle.forward_train(&own.input(), RNG_KEY).unwrap();
        let foreign = layer.backward(&saved, &dy, false).map(drop);
        assert!(matches!(foreign, Err(EngineError::ForeignSaved)));
        handle.backward(&saved, &dy, false).unwrap();
        let zero = |layer: &Layer| {
            let gradient = layer.gradient("router.weight").unwrap();
            gradient.to_f32().iter().all(|g| *g == 0.0)
        };
        assert!(zero(&layer) && !zero(&handle));
        let short = handle.forward_into(&own.input(), &mut [0.0f32; 3]);
        assert!(matches!(short, Err(EngineError::Output { .. })));
    });
}
