//! Random layers of codes, each on one target, against the f64 reference of the numbers that the
//! codes stand for.
//!
//! A seed names a target, a format and a layer. A test run takes the first few, which are for CPUs,
//! and a thorough run every format on every target. `MOESAIC_SEEDS=0..500` names others.

use super::cases::{of_type, quiet, small};
use super::layers::{poisoned, shipped};
use super::quick;
use super::random::seeds;
use super::stored::Stored;
use moesaic::reference::{Random, Weights};
use moesaic::spec::format::ScaleType;
use moesaic::spec::{
    Activation, ActivationFormat, Biases, ExpertForm, LayerSpec, RouterKind, SharedExpert,
    SharedGate, WEIGHT_FORMATS, WeightCode, WeightFormat, WeightSite, testing,
};
use moesaic::{DType, Engine, OpenError, Recompute, Target};
use moesaic_harness::thorough;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// CPUs that this machine is not, and a GPU of each family of kernels.
const OTHERS: [&str; 6] = [
    "sim:neon",
    "sim:neonbf16",
    "sim:amx",
    "sim:sm_80",
    "sim:sm_90a",
    "sim:gfx942",
];

/// Formats that have no name, as tables of a spec.
const TABLES: [&str; 6] = [
    r#""code":"e5m2","block":[3,24],"scale":"f16""#,
    r#""code":"uint8","block":[2,40],"scale":"bf16","offset":"zero""#,
    r#""code":"e2m1","block":[1,8],"scale":"int8","second":64,"offset":"int8""#,
    r#""code":"iq4nl","block":[1,0],"scale":"f32","offset":"f16""#,
    r#""code":"int4","block":[5,128],"scale":"e4m3","second":0,"offset":"zero""#,
    r#""code":"e4m3","block":[1,48],"scale":"e8m0","second":96"#,
];

fn formats() -> Vec<WeightFormat> {
    let table = |fields: &&str| {
        let format = serde_json::from_str(&format!(r#"{{"custom":{{{fields}}}}}"#));
        format.expect("a format")
    };
    let tables = TABLES.iter().map(table);
    WEIGHT_FORMATS.iter().copied().chain(tables).collect()
}

/// A stream of choices.
struct Choices(Random);

impl Choices {
    fn below(&mut self, count: usize) -> usize {
        (self.0.bits() >> 8) as usize % count
    }

    fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}

/// One layer, its call and its target.
struct Cell {
    stored: Stored,
    recompute: Option<Recompute>,
}

impl Cell {
    fn of(seed: u64, format: WeightFormat, target: Target) -> Cell {
        let mut choices = Choices(Random::new(seed ^ 0xc0de));
        let slow = !matches!(target, Target::Cpu(_));
        let on_cpu = matches!(target.hardware(), Target::Cpu(_));
        let sampled = !slow && choices.one_in(4);
        let mut spec = if sampled {
            quiet(testing::sample(seed))
        } else {
            layer(&mut choices, slow)
        };
        let most = if slow { 2 } else { 3 };
        let recompute = choices.of(&[
            None,
            Some(Recompute::None),
            Some(Recompute::Hidden),
            Some(Recompute::All),
        ]);
        let precision = &mut spec.precision;
        precision.experts = Some(format);
        precision.expert_gradients = DType::F32;
        precision.experts_down = choices.one_in(4).then(|| choices.of(&formats()));
        // Rounding has no gradient, and GPUs have no rows of codes.
        let rounds = recompute.is_none() && on_cpu && choices.one_in(2);
        let rows = [ActivationFormat::Int8, ActivationFormat::Fp8];
        precision.expert_activations = rounds.then(|| choices.of(&rows));
        let tokens = choices.of(&[0, 1, 7, 33, 70][..most + 1 + usize::from(!slow)]);
        let mut weights = Weights::random(&spec, seed).rounded(&spec);
        if !sampled {
            damage(&spec, &mut weights, recompute.is_some(), &mut choices);
        }
        let mut stored = Stored::of(spec, weights, tokens, seed);
        if choices.one_in(3) {
            crowd(&mut stored, &mut choices);
        }
        Cell { stored, recompute }
    }

    /// Returns false where rounding chose other experts, so that there is nothing to compare.
    fn agrees(&self, engine: &Engine) -> bool {
        match self.recompute {
            None => {
                self.stored.check(engine);
                true
            }
            Some(recompute) => self.stored.agrees(engine, recompute),
        }
    }
}

/// A layer whose widths fit no block, no vector and no tile.
fn layer(choices: &mut Choices, slow: bool) -> LayerSpec {
    let most = if slow { 70 } else { 400 };
    let [model, hidden] = [0; 2].map(|_| {
        let most = choices.of(&[9, 70, most]);
        1 + choices.below(most)
    });
    let experts = 1 + choices.below(7);
    let mut spec = small(model, hidden, experts, 1 + choices.below(experts));
    spec = of_type(choices.of(&[DType::F32, DType::Bf16, DType::F16]), spec);
    if choices.one_in(2) {
        spec.router.kind = RouterKind::External;
    }
    if choices.one_in(2) {
        spec.experts.bias = Biases::All;
    }
    if choices.one_in(4) {
        spec.experts.form = ExpertForm::Plain;
        spec.experts.activation = Activation::Gelu;
        spec.shape.output_dim = Some(1 + choices.below(most));
    }
    if choices.one_in(3) {
        spec.router.weight_on = choices.of(&[WeightSite::Input, WeightSite::Activation]);
    }
    if choices.one_in(3) {
        spec.shared = vec![SharedExpert {
            hidden_dim: 1 + choices.below(50),
            gate: choices.of(&[SharedGate::None, SharedGate::Sigmoid]),
            bias: None,
            clamp: None,
            activation: None,
        }];
    }
    spec
}

/// Spoils one part of one matrix: a scale that is zero or NaN, or a code of NaN. In the backward
/// pass such a code spoils its block, which the reference does not.
fn damage(spec: &LayerSpec, weights: &mut Weights, trains: bool, choices: &mut Choices) {
    let matrix = choices.of(&["up", "down"]);
    let name = |end| format!("experts.{matrix}.{end}");
    let format = spec.precision.format_of(&name("weight"));
    let format = format.expect("experts are codes");
    let (end, byte, number) = match choices.below(6) {
        0 => ("scale", Some(0), 0.0),
        1 => match format.scale {
            ScaleType::E8m0 => ("scale", Some(255), 0.0),
            ScaleType::E4m3 => ("scale", Some(0x7f), 0.0),
            ScaleType::Int8 => ("scale", Some(128), 0.0),
            _ => ("scale", None, f64::NAN),
        },
        2 if !trains && matches!(format.code, WeightCode::E4m3 | WeightCode::E5m2) => {
            ("weight", Some(0xff), 0.0)
        }
        3 if format.second.is_some() => ("scale_2", None, choices.of(&[0.0, f64::NAN])),
        _ => return,
    };
    let words = end == "weight" || (end == "scale" && format.scale.dtype().is_none());
    let tensor = weights.0.get_mut(&name(end)).expect("it has one");
    let at = choices.below(tensor.data.len());
    tensor.data[at] = match byte.filter(|_| words) {
        Some(byte) => {
            let shift = 8 * choices.below(4);
            let word = tensor.data[at] as i64 as u32 & !(0xff << shift);
            f64::from((word | byte << shift) as i32)
        }
        None => number,
    };
}

/// Sends every token to one expert, so that the others have none.
fn crowd(stored: &mut Stored, choices: &mut Choices) {
    let (experts, k) = (stored.spec.routed_experts(), stored.spec.shape.top_k);
    if let Some((ids, weights)) = &mut stored.plain.input.routing {
        let one = choices.below(experts) as i32;
        for (slot, (id, weight)) in ids.iter_mut().zip(weights).enumerate() {
            (*id, *weight) = match slot % k {
                0 => (one, 0.75),
                _ => (-1, 0.0),
            };
        }
    }
}

/// The engines of this machine, those of its CPU with the compiler's usual flags and hurried.
fn engines() -> Vec<[Engine; 2]> {
    let cpus = shipped().into_iter().map(|engine| {
        let name = engine.target().to_string();
        let hurried = quick::open(&name, poisoned()).expect("it was open");
        [engine, hurried]
    });
    let others = OTHERS
        .into_iter()
        .filter_map(|target| match quick::open(target, poisoned()) {
            Err(OpenError::Device(error)) => {
                eprintln!("{target} is not tested: {error}");
                None
            }
            engine => {
                let engine = engine.unwrap_or_else(|error| panic!("{target}: {error}"));
                Some([engine.clone(), engine])
            }
        });
    cpus.chain(others).collect()
}

#[test]
fn random_codes_agree_with_the_reference() {
    let (engines, formats) = (engines(), formats());
    let (count, all) = (engines.len(), engines.len() * formats.len());
    let usual = if thorough::is_on() { 0..all } else { 0..4 };
    let (mut compared, mut passed_over, mut wrong) = (0, Vec::new(), Vec::new());
    for seed in seeds(usual.start as u64..usual.end as u64) {
        let n = seed as usize;
        let engine = &engines[n % count][n / count % 2];
        // Neighbouring targets have formats that are far from each other.
        let format = formats[(n / count + n % count * 5) % formats.len()];
        let agrees = || Cell::of(seed, format, engine.target()).agrees(engine);
        match catch_unwind(AssertUnwindSafe(agrees)) {
            Ok(true) => compared += 1,
            Ok(false) => passed_over.push(seed),
            Err(_) => wrong.push((seed, engine.target(), format.to_string())),
        }
    }
    println!("{compared} compared; others chosen in {passed_over:?}");
    assert!(wrong.is_empty(), "{} differ: {wrong:#?}", wrong.len());
    assert!(compared > passed_over.len(), "{passed_over:?}");
}
