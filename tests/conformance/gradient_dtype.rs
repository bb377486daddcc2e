//! Gradients of experts' matrices in 16 bits are those in f32, rounded once, to the bit.

use super::Case;
use super::case::host;
use super::cases::{of_type, small};
use super::layers::{engine, engines, shipped};
use super::mesh::{layer_on, mesh, on_ranks, part, shares};
use super::simulated::open;
use super::trained::{RNG_KEY, Results};
use moesaic::reference::round_to;
use moesaic::spec::{ExpertForm, LayerSpec, SharedExpert, SharedGate, gradient_dtype};
use moesaic::train::mesh::{MeshOptimizer, Scaling, update_mesh};
use moesaic::train::{Sgd, masters};
use moesaic::{DType, Engine, Layer, Recompute, Training};
use moesaic_harness::thorough::one_in;

/// A layer whose gradients have the dtype of its weights.
fn narrow(dtype: DType, mut spec: LayerSpec) -> LayerSpec {
    spec = of_type(dtype, spec);
    spec.precision.expert_gradients = dtype;
    spec
}

/// Routed experts with biases and a shared one, of widths that no vector divides.
fn busy(dtype: DType) -> LayerSpec {
    let mut spec = narrow(dtype, small(45, 70, 5, 2));
    spec.experts.bias = true.into();
    spec.router.bias = true;
    spec.shared = vec![SharedExpert {
        hidden_dim: 40,
        gate: SharedGate::Sigmoid,
        bias: None,
        clamp: None,
        activation: None,
    }];
    spec
}

/// A layer with gradients in 16 bits, and the same in f32.
struct Pair {
    narrow: Layer,
    wide: Layer,
}

impl Pair {
    fn new(spec: &LayerSpec, engine: &Engine) -> Pair {
        let mut wide = spec.clone();
        wide.precision.expert_gradients = DType::F32;
        let layer = |spec| Case::random(spec, 0, 5).training_layer(engine, Recompute::None);
        Pair {
            narrow: layer(spec),
            wide: layer(&wide),
        }
    }

    /// Compares one backward pass, and a second that adds to the first.
    fn check(&self, case: &Case) {
        let dy = case.dy(7);
        let run = |layer, accumulate: &[bool]| case.train(layer, &dy, accumulate).0;
        let (sums, once) = (run(&self.wide, &[false]), run(&self.narrow, &[false]));
        let twice = run(&self.narrow, &[false, true]);
        compare(case, "once", &once, |name, at| sums[name][at] as f32);
        compare(case, "twice", &twice, |name, at| {
            once[name][at] as f32 + sums[name][at] as f32
        });
        for name in sums
            .keys()
            .filter(|name| self.narrow.gradient(name).is_ok())
        {
            let found = self.narrow.gradient(name).expect("it is there").dtype;
            assert_eq!(found, gradient_dtype(&case.spec, name), "{name}");
        }
    }
}

/// Compares gradients of matrices with sums in f32, after rounding.
fn compare(case: &Case, when: &str, found: &Results, want: impl Fn(&str, usize) -> f32) {
    let matrices = found
        .iter()
        .filter(|(name, _)| gradient_dtype(&case.spec, name) != DType::F32);
    let mut count = 0;
    for (name, values) in matrices {
        let dtype = gradient_dtype(&case.spec, name);
        for (at, value) in values.iter().enumerate() {
            let want = round_to(dtype, f64::from(want(name, at)));
            let same = *value == want || value.is_nan() && want.is_nan();
            let what = || format!("{when}: {name}[{at}] of {}", case.describe());
            assert!(same, "{value:e} is not {want:e}, {}", what());
        }
        count += 1;
    }
    assert!(count >= 3, "gate, up and down");
}

/// Routes all tokens to one expert.
fn crowd(case: &mut Case) {
    let bias = case.weights.0.get_mut("router.bias").expect("it has one");
    bias.data = (0..bias.data.len())
        .map(|at| f64::from(at == 2) * 99.0)
        .collect();
}

fn check(spec: &LayerSpec, engine: &Engine, all: &[usize]) {
    let pair = Pair::new(spec, engine);
    for &tokens in all {
        // The weights of seed 5, whatever the number of tokens.
        pair.check(&Case::random(spec, tokens, 5));
    }
}

/// Every instruction set of this CPU.
#[test]
fn cpus_round_sums_once() {
    let dtypes = [DType::Bf16, DType::F16];
    for (n, engine) in engines().iter().enumerate() {
        for dtype in one_in(2, n, dtypes) {
            check(&busy(dtype), engine, &[0, 1, 33, 300]);
        }
    }
}

/// Kernels as people get them, more rows than a slice has, and a token of NaN.
#[test]
fn many_rows_of_one_expert_are_rounded_once() {
    let widest = engine().target();
    let engines = shipped().into_iter();
    for engine in engines.filter(|engine| engine.target() == widest) {
        let spec = busy(DType::Bf16);
        let mut case = Case::random(&spec, 777, 5);
        crowd(&mut case);
        let layer = |spec: &LayerSpec| {
            let mut case = Case::random(spec, 0, 5);
            crowd(&mut case);
            case.training_layer(&engine, Recompute::None)
        };
        let mut wide = spec.clone();
        wide.precision.expert_gradients = DType::F32;
        let pair = Pair {
            narrow: layer(&spec),
            wide: layer(&wide),
        };
        pair.check(&case);
        case.input.x[3] = f64::NAN;
        pair.check(&case);
    }
}

/// Experts with and without tokens, in gradients that are written past the caches: 32 MiB.
#[test]
fn large_gradients_are_rounded_once() {
    let mut spec = narrow(DType::Bf16, small(2048, 544, 16, 1));
    spec.experts.form = ExpertForm::Plain;
    let case = Case::random(&spec, 5, 5);
    let engine = engine();
    let bits = |dtype: DType| {
        let mut case = case.clone();
        case.spec.precision.expert_gradients = dtype;
        let layer = case.training_layer(&engine, Recompute::None);
        let input = case.input();
        let (_, saved) = layer
            .forward_train(input.reading(&["y"]), Default::default())
            .expect("it runs");
        let shape = [5, 2048];
        let dy = host(DType::Bf16, &shape, &case.dy(7));
        layer.backward(&saved, &dy, false).expect("it runs");
        ["experts.up.weight", "experts.down.weight"].map(|name| {
            let found = layer.gradient(name).expect("it has one");
            assert_eq!(found.dtype, dtype);
            let values = found.to_f32().into_iter();
            let each = values.map(moesaic::half::bf16::from_f32);
            each.map(|value| value.to_bits()).collect::<Vec<u16>>()
        })
    };
    assert!(bits(DType::Bf16) == bits(DType::F32));
}

/// AMX keeps sums of slices of 512 rows in scratch.
#[test]
fn emulated_cpus_round_sums_once() {
    check(&busy(DType::Bf16), &open("sim:amx"), &[1, 33]);
    let spec = narrow(DType::Bf16, small(64, 96, 1, 1));
    let engine = open("sim:amx");
    let pair = Pair::new(&spec, &engine);
    let case = Case::random(&spec, 1100, 5);
    let dy = case.dy(7);
    let run = |layer, accumulate: &[bool]| case.train(layer, &dy, accumulate).0;
    let sums = run(&pair.wide, &[false]);
    compare(&case, "slices", &run(&pair.narrow, &[false]), |name, at| {
        sums[name][at] as f32
    });
    // The old gradient is added to the first slice's sum, in f32 as here.
    let doubled = run(&pair.wide, &[false, true]);
    let unit = DType::Bf16.unit_roundoff();
    for (name, found) in &run(&pair.narrow, &[false, true]) {
        let pairs = found.iter().zip(&doubled[name]);
        let most = |want: &f64| 2.0 * unit * want.abs() + 1e-4;
        let near = |(found, want): (&f64, &f64)| (found - want).abs() <= most(want);
        assert!(pairs.into_iter().all(near), "{name}");
    }
    check(&busy(DType::F16), &open("sim:neon"), &[1, 13]);
    check(&busy(DType::Bf16), &open("sim:neonbf16"), &[1, 13]);
}

/// Each family of kernels of both vendors.
#[test]
fn simulated_gpus_round_sums_once() {
    let bf16 = narrow(DType::Bf16, small(64, 72, 5, 2));
    for target in ["sim:sm_80", "sim:sm_90a", "sim:gfx942", "sim:gfx1100"] {
        check(&bf16, &open(target), &[0, 1, 40]);
    }
    for target in ["sim:sm_75", "sim:sm_80", "sim:gfx908", "sim:gfx942"] {
        check(&busy(DType::F16), &open(target), &[33]);
    }
}

/// Sums over ranks, their mean, and a step of an optimizer; [`mesh`](super::mesh) compares with one
/// process.
#[test]
fn ranks_sum_and_step_gradients_of_16_bits() {
    let spec = narrow(DType::Bf16, small(24, 16, 6, 2));
    let case = Case::random(&spec, 41, 3);
    let (engine, parallel) = (engine(), mesh(2, 1, 2));
    let shares = shares(41, parallel.ranks());
    on_ranks(&engine, parallel, |mesh| {
        let layer = layer_on(&engine, mesh, &case, Some(Training::default()));
        let tokens = &shares[mesh.rank()];
        let own = part(&case, tokens);
        let (_, saved) = layer.forward_train(&own.input(), RNG_KEY).expect("it runs");
        let dy = &case.dy(7)[tokens.start * 24..tokens.end * 24];
        let dy = host(DType::Bf16, &[tokens.len(), 24], dy);
        let reduced = |average: bool| {
            layer.backward(&saved, &dy, false).expect("it runs");
            let summed = if average {
                layer.average_gradients()
            } else {
                layer.reduce_gradients()
            };
            summed.expect("they are summed");
            layer.gradients().expect("the layer trains")
        };
        let (sums, means) = (reduced(false), reduced(true));
        for (name, sum) in &sums {
            assert_eq!(sum.dtype, gradient_dtype(&spec, name), "{name}");
            // Of four ranks: no mean is rounded.
            let want: Vec<f32> = sum.to_f32().iter().map(|value| value / 4.0).collect();
            assert_eq!(means[name].to_f32(), want, "{name}");
        }
        let mut parameters = masters(&layer.weights_of(&case.host_weights()).expect("its part"));
        let before = parameters[UP].to_f32();
        layer.backward(&saved, &dy, false).expect("it runs");
        let ranks = layer.ranks().expect("it has ranks");
        let mut optimizer = MeshOptimizer::new(&ranks, Sgd::new(0.5));
        let scaling = Scaling::default();
        update_mesh(&layer, &mut optimizer, &mut parameters, scaling).expect("a step");
        let steps = before.iter().zip(sums[UP].to_f32());
        let want: Vec<f32> = steps.map(|(weight, sum)| weight - 0.5 * sum).collect();
        assert_eq!(parameters[UP].to_f32(), want);
    });
}

const UP: &str = "experts.up.weight";
