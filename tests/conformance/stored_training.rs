//! Training through experts that are codes: every gradient is that of the layer of the numbers that
//! codes stand for, and the matrices have none.

use super::arranged::{grid, ranks};
use super::cases::{of_type, quiet, small};
use super::layers::{engine as cpu, engines};
use super::mesh::{compare, compare_on, evaluated, mesh, on_ranks, part, shares, specs};
use super::mesh_placed::scattered;
use super::simulated::{self, SIMULATORS};
use super::stored::{Stored, shapes};
use super::trained::near;
use moesaic::mesh::Split;
use moesaic::spec::{
    Activation, Biases, ExpertForm, LayerSpec, RouterKind, SharedExpert, SharedGate,
    WEIGHT_FORMATS, WeightSite, canonical_tensors, testing,
};
use moesaic::train::mesh::parts;
use moesaic::train::migrate::prepare;
use moesaic::train::{AdamW, masters, update};
use moesaic::{DType, Engine, EngineError, Layer, LayerOptions, Recompute};
use moesaic_harness::thorough::{self, in_turns, one_in, takes};

const RECOMPUTE: [Recompute; 3] = [Recompute::None, Recompute::Hidden, Recompute::All];

impl Stored {
    /// Trains once and holds every gradient against the reference.
    fn check_training(&self, engine: &Engine, recompute: Recompute) {
        let layer = self.training_layer(engine, recompute);
        self.plain.check_layer(&layer);
        self.plain.check_gradients(&layer);
        self.check_frozen(&layer);
    }

    /// As [`trained::agrees`], for layers of every kind.
    ///
    /// [`trained::agrees`]: super::trained::agrees
    pub fn agrees(&self, engine: &Engine, recompute: Recompute) -> bool {
        let layer = self.training_layer(engine, recompute);
        let dy = self.plain.dy(77);
        let (found, ids) = self.plain.train(&layer, &dy, &[false]);
        if ids != self.plain.chosen() {
            return false;
        }
        let want = self.plain.trained(&dy);
        let finite = want.values().flatten().filter(|v| v.is_finite());
        let largest = finite.fold(0.0, |most: f64, v| most.max(v.abs()));
        for (name, found) in found.iter().filter(|(name, _)| *name != "y") {
            let what = format!("gradient `{name}` of {}", self.plain.describe());
            near(&what, &self.plain.spec, found, &want[name], largest);
        }
        self.check_frozen(&layer);
        true
    }

    /// The matrices of experts have no gradient and say why; all other weights have one, biases of
    /// experts too.
    fn check_frozen(&self, layer: &Layer) {
        for tensor in canonical_tensors(&self.spec) {
            let of_experts = tensor.name.starts_with("experts.");
            let frozen = of_experts && !tensor.name.ends_with(".bias");
            let found = layer.gradient(&tensor.name);
            if frozen {
                let error = found.err().map(|error| error.to_string());
                let error = error.unwrap_or_else(|| panic!("{} has a gradient", tensor.name));
                assert!(error.contains("codes, which cannot be trained"), "{error}");
            } else if of_experts || tensor.name == "router.weight" {
                assert!(found.is_ok(), "{}: {:?}", tensor.name, found.err());
            }
        }
    }
}

#[test]
fn every_format_is_trained_through() {
    for (n, engine) in engines().into_iter().enumerate() {
        for (i, format) in WEIGHT_FORMATS.iter().enumerate() {
            if !takes(n + i, 4) {
                continue;
            }
            let (spec, tokens) = shapes()[(n + i) % 5].clone();
            let dtype = [DType::F32, DType::Bf16, DType::F16][(n + 2 * i) % 3];
            let spec = of_type(dtype, spec);
            Stored::random(&spec, format.name, tokens, (20 * i + n) as u64)
                .check_training(&engine, RECOMPUTE[(n + i) % 3]);
        }
    }
}

/// Random layers, with formats that have no name and formats of their own for the down projection.
#[test]
fn random_layers_are_trained_through() {
    for (n, engine) in engines().into_iter().enumerate() {
        let mut compared = 0;
        let step = if thorough::is_on() { 5 } else { 25 };
        for (i, spec) in testing::quantized().enumerate().skip(n).step_by(step) {
            let mut spec = quiet(spec);
            // Rounding has no gradient.
            spec.precision.expert_activations = None;
            let stored = Stored::sampled(spec, [1, 9, 40][i % 3], i as u64);
            compared += usize::from(stored.agrees(&engine, RECOMPUTE[i % 3]));
        }
        assert!(compared >= 3, "{compared} layers were compared");
    }
}

/// Layers that differ in what flows back through them.
fn changes() -> Vec<LayerSpec> {
    let with = |change: fn(&mut LayerSpec)| {
        let mut spec = small(48, 40, 4, 2);
        spec.experts.bias = Biases::All;
        change(&mut spec);
        spec
    };
    let shared = |gate| SharedExpert {
        hidden_dim: 24,
        gate,
        bias: None,
        clamp: None,
        activation: None,
    };
    let mut list = vec![
        with(|s| s.router.weight_on = WeightSite::Input),
        with(|s| s.router.weight_on = WeightSite::Activation),
        with(|s| {
            s.experts.form = ExpertForm::Plain;
            s.experts.activation = Activation::Gelu;
            s.shape.output_dim = Some(17);
        }),
        with(|s| {
            s.experts.clamp = Some(0.7);
            s.experts.up_offset = 1.0;
        }),
    ];
    list.extend(
        [SharedGate::None, SharedGate::Sigmoid].map(|gate| LayerSpec {
            shared: vec![shared(gate)],
            ..small(48, 40, 4, 2)
        }),
    );
    list
}

#[test]
fn what_flows_back_is_right() {
    for (n, engine) in engines().into_iter().enumerate() {
        for (i, spec) in one_in(6, n, changes().into_iter().enumerate()) {
            let format = ["mxfp4", "fp8", "q4_k", "uint4-g32"][(n + i) % 4];
            // In f32 no rounding crosses the clamp.
            let dtype = match spec.experts.clamp {
                Some(_) => DType::F32,
                None => [DType::F32, DType::Bf16][(n + i) % 2],
            };
            let spec = of_type(dtype, spec);
            Stored::random(&spec, format, 33, i as u64).check_training(&engine, RECOMPUTE[i % 3]);
        }
    }
}

/// One expert gets everything, more than a tile of it, and the others nothing; widths are more than
/// a depth slice and more than a block of columns.
#[test]
fn a_crowded_expert_is_trained_through() {
    for (n, engine) in engines().into_iter().enumerate() {
        let format = ["int4-g32", "mxfp8", "q6_k", "nvfp4"][n % 4];
        let layers = [(DType::Bf16, [330, 610]), (DType::F32, [70, 300])];
        for (dtype, [model, hidden]) in in_turns(n, layers) {
            let mut spec = of_type(dtype, small(model, hidden, 3, 1));
            spec.router.kind = RouterKind::External;
            let mut stored = Stored::random(&spec, format, 421, n as u64);
            let routing = stored.plain.input.routing.as_mut();
            routing.expect("it is external").0.fill(1);
            stored.check_training(&engine, RECOMPUTE[n % 3]);
        }
    }
}

/// A token of NaN spoils its own gradients, and those of what every token shares.
#[test]
fn nan_stays_in_its_token() {
    let engine = cpu();
    for dtype in [DType::F32, DType::Bf16] {
        let spec = of_type(dtype, small(40, 24, 3, 1));
        let mut stored = Stored::random(&spec, "q8_0", 12, 5);
        stored.plain.input.x[3 * 40 + 7] = f64::NAN;
        let layer = stored.training_layer(&engine, Recompute::None);
        let (found, _) = stored.plain.train(&layer, &stored.plain.dy(1), &[false]);
        for (at, dx) in found["dx"].chunks(40).enumerate() {
            let spoilt = dx.iter().any(|v| v.is_nan());
            assert_eq!(spoilt, at == 3, "token {at}");
        }
    }
}

/// An evaluation, and a forward pass that trains, give the same bytes as a layer for inference:
/// codes are packed once, for all of them and for backward.
#[test]
fn training_does_not_change_y() {
    let engine = cpu();
    let stored = Stored::random(&of_type(DType::Bf16, small(96, 64, 4, 2)), "fp8", 33, 9);
    let trains = stored.training_layer(&engine, Recompute::None);
    let weights = stored.case().host_weights();
    let infers = engine.layer(&stored.spec, &weights).expect("a layer");
    let y = |layer: &Layer| {
        let output = layer.forward(&stored.plain.input());
        output.expect("it runs").get("y").expect("y").data.to_vec()
    };
    assert_eq!(y(&trains), y(&infers));
    let bytes = |layer: &Layer| {
        let plan = layer.plan();
        let held = plan.tensors.iter().filter(|t| t.name.ends_with(".packed"));
        held.map(|tensor| tensor.bytes(0)).collect::<Vec<u64>>()
    };
    assert_eq!(bytes(&trains), bytes(&infers));
    for tensor in ["experts.up.weight", "experts.down.weight"] {
        let id = trains.plan().id(tensor).expect("it is a weight");
        assert!(trains.plan().packs_away(id), "{tensor} is held twice");
    }
}

/// New codes are packed in place of the old ones.
#[test]
fn codes_can_be_replaced() -> Result<(), EngineError> {
    let engine = cpu();
    let spec = of_type(DType::F32, small(64, 48, 3, 1));
    let [old, new] = [1, 2].map(|seed| Stored::random(&spec, "mxfp4", 20, seed));
    let layer = old.training_layer(&engine, Recompute::None);
    for (name, tensor) in new.case().host_weights() {
        layer.set_weight(&name, &tensor)?;
    }
    new.plain.check_gradients(&layer);
    Ok(())
}

/// CPUs of other kinds, under emulation.
#[test]
fn emulated_cpus_train_through_codes() {
    for (n, target) in ["sim:neon", "sim:neonbf16", "sim:amx"]
        .into_iter()
        .enumerate()
    {
        let engine = simulated::open(target);
        let formats = WEIGHT_FORMATS.iter().enumerate();
        for (i, format) in one_in(8, n, formats.skip(n % 3).step_by(3)) {
            let dtype = [DType::Bf16, DType::F32][i % 4 / 3];
            let (spec, tokens) = shapes()[i % 4].clone();
            Stored::random(&of_type(dtype, spec), format.name, tokens.min(33), i as u64)
                .check_training(&engine, RECOMPUTE[i % 3]);
        }
    }
}

/// GPUs multiply the numbers of codes, and make gradients of the same weights as CPUs do.
#[test]
fn gpus_have_the_same_gradients() {
    for target in [SIMULATORS[0], SIMULATORS[2]] {
        let engine = simulated::open(target);
        let mut spec = of_type(DType::F32, small(24, 16, 3, 2));
        spec.experts.bias = Biases::All;
        for format in ["mxfp4", "q4_k"] {
            Stored::random(&spec, format, 9, 4).check_training(&engine, Recompute::None);
        }
    }
}

/// An optimizer leaves codes and their scales alone, and moves everything else.
#[test]
fn an_optimizer_moves_what_is_not_frozen() {
    let mut spec = of_type(DType::F32, small(32, 24, 3, 2));
    spec.experts.bias = Biases::All;
    let stored = Stored::random(&spec, "int8-g32", 20, 6);
    let layer = stored.training_layer(&cpu(), Recompute::None);
    let before = masters(&stored.case().host_weights());
    let moved = [
        "experts.down.bias",
        "experts.gate.bias",
        "experts.up.bias",
        "router.weight",
    ];
    assert!(before.keys().eq(moved), "{:?}", before.keys());
    let mut after = before.clone();
    stored.plain.train(&layer, &stored.plain.dy(2), &[false]);
    update(&layer, &mut AdamW::new(1e-2), &mut after).expect("a step");
    for (name, before) in &before {
        assert_ne!(before.to_f32(), after[name].to_f32(), "{name}");
    }
}

/// A rank has the codes of its own experts.
#[test]
fn ranks_train_through_codes() {
    let engine = cpu();
    for (seed, spec) in specs().iter().enumerate() {
        let format = ["fp8", "mxfp4", "q4_k", "uint4-g32", "nvfp4"][seed % 5];
        let case = Stored::random(spec, format, 41, seed as u64).case();
        let whole = case.layer(&engine).forward(&case.input()).expect("it runs");
        let found = evaluated(&engine, mesh(2, 1, 2), &case);
        assert!(found == *whole.y().data, "{}", case.describe());
        compare(&engine, mesh(2, 1, 1), &case, RECOMPUTE[seed % 3]);
    }
}

/// Shadows and gathered experts arrive as packed codes: y is that of one process to the byte, and
/// gradients are the same.
#[test]
fn codes_travel_to_other_ranks() {
    let engine = cpu();
    let strategies = [
        (mesh(4, 1, 1), "shadows=2"),
        (mesh(2, 1, 2), "overlap_degree=2,shadows=3"),
        (mesh(3, 1, 1), "r=0"),
        (mesh(2, 1, 2), "r=0"),
    ];
    for (seed, spec) in specs().iter().enumerate() {
        let format = ["mxfp4", "fp8", "q4_k", "nvfp4", "uint4-g32"][seed % 5];
        let case = Stored::random(spec, format, 41, seed as u64).case();
        let whole = case.layer(&engine).forward(&case.input()).expect("it runs");
        for (at, (parallel, strategy)) in in_turns(seed, strategies.into_iter().enumerate()) {
            let placement = scattered(parallel.ep, spec.shape.experts, seed as u64, Split::Even);
            let placement = (at % 2 == seed % 2).then_some(&placement);
            let ranks = ranks(&engine, placement);
            let found = evaluated(&ranks, grid(parallel, strategy), &case);
            assert!(found == *whole.y().data, "{strategy}: {}", case.describe());
            if at % 2 == seed % 2 {
                let recompute = RECOMPUTE[seed % 3];
                compare_on(&engine, &ranks, grid(parallel, strategy), &case, recompute);
            }
        }
    }
}

/// Experts that move between ranks take their codes and scales along.
#[test]
fn codes_migrate() {
    let engine = cpu();
    let case = Stored::random(&small(64, 48, 8, 2), "q4_k", 23, 4).case();
    let whole = case.layer(&engine).forward(&case.input()).expect("it runs");
    let parallel = mesh(3, 1, 1);
    let to = scattered(3, 8, 17, Split::Even);
    let tokens = shares(23, 3);
    let outputs = on_ranks(&engine, parallel, |mesh| {
        let weights = case.host_weights();
        let names = weights.keys().map(String::as_str);
        let before = parts(mesh, &weights, names).expect("its part");
        let moved = prepare(&engine.ranks(mesh), &to, &before).expect("they move");
        let mesh = moved.mesh().clone();
        let after = moved.commit().expect("all have arrived");
        let layer = engine.layer_with(
            &case.spec,
            &after,
            LayerOptions {
                part: true,
                ..LayerOptions::over(&mesh)
            },
        );
        let own = part(&case, &tokens[mesh.rank()]);
        let output = layer.expect("a layer").forward(&own.input());
        output.expect("it runs").y().data.to_vec()
    });
    assert!(outputs.concat() == *whole.y().data);
}

/// An expert of codes cannot be cut.
#[test]
fn shards_of_codes_are_refused() {
    let case = Stored::random(&small(64, 48, 4, 2), "mxfp4", 2, 1).case();
    let errors = on_ranks(&cpu(), mesh(1, 2, 1), |mesh| {
        let layer = cpu().layer_with(&case.spec, &case.host_weights(), LayerOptions::over(mesh));
        layer.expect_err("it is refused").to_string()
    });
    for error in errors {
        assert!(error.contains("expert_tp = 2"), "{error}");
    }
}
