//! Layers whose experts are codes: every format on every CPU, against the f64 reference of the
//! numbers that the codes stand for.

use super::Case;
use super::cases::{of_type, small};
use super::layers::{engines, shipped};
use super::quick;
use moesaic::reference::{Weights, numbers};
use moesaic::spec::{
    ActivationFormat, Biases, ExpertForm, LayerSpec, WEIGHT_FORMATS, WeightFormat,
};
use moesaic::{DType, Engine, EngineError, Layer, OpenError, Recompute, Training};
use moesaic_harness::thorough::{in_turns, one_in};

/// A layer of codes, and the case of the layer that it stands for.
pub struct Stored {
    pub spec: LayerSpec,
    pub weights: Weights,
    pub plain: Case,
}

impl Stored {
    pub fn random(spec: &LayerSpec, format: &str, tokens: usize, seed: u64) -> Stored {
        let mut spec = spec.clone();
        spec.precision.experts = WeightFormat::named(format);
        spec.precision.expert_gradients = DType::F32; // codes have none
        Stored::sampled(spec, tokens, seed)
    }

    /// The same of a spec that names its formats.
    pub fn sampled(spec: LayerSpec, tokens: usize, seed: u64) -> Stored {
        let weights = Weights::random(&spec, seed).rounded(&spec);
        Stored::of(spec, weights, tokens, seed)
    }

    pub fn of(spec: LayerSpec, weights: Weights, tokens: usize, seed: u64) -> Stored {
        let (plain, decoded) = numbers(&spec, &weights);
        let mut case = Case::random(&plain, tokens, seed);
        case.weights = decoded;
        Stored {
            spec,
            weights,
            plain: case,
        }
    }

    /// The case of the codes themselves.
    pub fn case(&self) -> Case {
        Case {
            spec: self.spec.clone(),
            weights: self.weights.clone(),
            input: self.plain.input.clone(),
        }
    }

    fn layer(&self, engine: &Engine) -> Result<Layer, EngineError> {
        engine.layer(&self.spec, &self.case().host_weights())
    }

    /// The layer on an engine, able to run backward.
    pub fn training_layer(&self, engine: &Engine, recompute: Recompute) -> Layer {
        let weights = self.case().host_weights();
        let layer = engine.training_layer(&self.spec, &weights, Training { recompute });
        layer.unwrap_or_else(|error| panic!("{}: {error}", self.plain.describe()))
    }

    pub fn check(&self, engine: &Engine) {
        let layer = self.layer(engine);
        let name = self.spec.precision.experts.map(|format| format.name);
        let layer = layer.unwrap_or_else(|error| panic!("{name:?}: {error}"));
        self.plain.check_layer(&layer);
    }
}

/// Widths that are no multiple of a block, of a vector or of a byte, and calls of few and of many
/// tokens.
pub fn shapes() -> [(LayerSpec, usize); 5] {
    let biased = |mut spec: LayerSpec| {
        spec.experts.bias = Biases::All;
        spec
    };
    [
        (small(37, 21, 5, 2), 7),
        (biased(small(160, 96, 4, 2)), 33),
        (small(9, 5, 1, 1), 1),
        (biased(small(300, 140, 3, 3)), 70),
        (small(64, 33, 6, 1), 0),
    ]
}

#[test]
fn every_format_is_the_layer_of_its_numbers() {
    for (n, engine) in engines().into_iter().enumerate() {
        for (i, format) in one_in(2, n, WEIGHT_FORMATS.iter().enumerate()) {
            // A compiler runs for each layer: formats take turns with sets, shapes and types.
            for turn in in_turns(n + i, 0..2) {
                let j = n + i + 2 * turn;
                let (spec, tokens) = shapes()[j % 5].clone();
                let dtype = [DType::F32, DType::Bf16, DType::F16][(i + j) % 3];
                let spec = of_type(dtype, spec);
                Stored::random(&spec, format.name, tokens, (10 * i + j) as u64).check(&engine);
            }
        }
    }
}

/// CPUs that this one is not: aarch64 under QEMU, and AMX, whose codes are multiplied as AVX-512
/// does. A format of each way to decode, with rows as numbers and as codes.
#[test]
fn emulated_cpus_multiply_codes() {
    const FORMATS: [&str; 6] = ["int4-g32", "mxfp4", "q8_0", "fp8", "q4_k", "nvfp4"];
    const ROWS: [Option<ActivationFormat>; 3] = [
        Some(ActivationFormat::Int8),
        None,
        Some(ActivationFormat::Fp8),
    ];
    for (n, target) in ["sim:neon", "sim:neonbf16", "sim:amx"]
        .into_iter()
        .enumerate()
    {
        let engine = match quick::open(target, super::layers::poisoned()) {
            Err(OpenError::Device(error)) if target == "sim:amx" => {
                eprintln!("not tested: {error}");
                continue;
            }
            engine => engine.unwrap(),
        };
        for (i, format) in in_turns(n, FORMATS.into_iter().enumerate()) {
            let (mut spec, tokens) = shapes()[i % 4].clone();
            spec.precision.expert_activations = ROWS[if i < 3 { 0 } else { i % 3 }];
            let spec = of_type([DType::Bf16, DType::F32][(n + i) % 2], spec);
            Stored::random(&spec, format, tokens, i as u64).check(&engine);
        }
    }
}

/// Rows become codes, too: integers meet integers, and floats, and the other way round.
#[test]
fn activations_are_codes() {
    for (n, engine) in engines().into_iter().enumerate() {
        for (i, format) in one_in(6, n, WEIGHT_FORMATS.iter().enumerate()) {
            // Of three layers in a row two have integers.
            let at = n + i;
            let rows = [ActivationFormat::Int8, ActivationFormat::Fp8][at % 3 % 2];
            let (mut spec, tokens) = shapes()[at % 5].clone();
            spec.precision.expert_activations = Some(rows);
            let spec = of_type([DType::F32, DType::Bf16, DType::F16][at / 3 % 3], spec);
            Stored::random(&spec, format.name, tokens, i as u64).check(&engine);
        }
    }
}

/// A token with NaN or infinity has NaN, and its neighbours do not notice.
#[test]
fn a_token_of_nan_stays_alone() {
    for engine in engines() {
        for (format, rows) in [
            ("int4-g32", ActivationFormat::Int8),
            ("fp8", ActivationFormat::Fp8),
        ] {
            let mut spec = small(96, 64, 2, 1);
            spec.precision.expert_activations = Some(rows);
            let mut stored = Stored::random(&spec, format, 12, 5);
            let x = &mut stored.plain.input.x;
            for (token, value) in [(3, f64::NAN), (8, f64::INFINITY)] {
                x[token * 96 + 40] = value;
            }
            stored.check(&engine);
        }
    }
}

#[test]
fn activations_are_codes_on_cpus_and_without_gradients() {
    let mut spec = small(32, 16, 2, 1);
    spec.precision.expert_activations = Some(ActivationFormat::Int8);
    let stored = Stored::random(&spec, "mxfp4", 1, 1);
    let sim = Engine::open("sim:sm_80", super::layers::poisoned()).unwrap();
    let error = stored.layer(&sim).expect_err("it is refused").to_string();
    assert!(
        error.contains("`precision.expert_activations` = \"int8\" is for CPUs"),
        "{error}"
    );
    let case = stored.case();
    let weights = case.host_weights();
    let error = super::layers::engine().training_layer(&stored.spec, &weights, Training::default());
    assert!(error.is_err(), "it has no gradients");
}

/// Depth slices: a sum goes over more than fits into a thread's scratch memory.
#[test]
fn long_rows_are_cut_at_blocks() {
    let formats = ["fp8", "mxfp4", "q4_k", "nvfp4", "int8"].into_iter();
    for (n, engine) in engines().into_iter().enumerate() {
        for (i, format) in in_turns(n, formats.clone().enumerate()) {
            let spec = of_type([DType::Bf16, DType::F32][i % 2], small(2100, 40, 2, 1));
            Stored::random(&spec, format, 9, i as u64).check(&engine);
        }
    }
}

/// A code, or a scale, of NaN makes NaN of what it is multiplied into, and of nothing else.
#[test]
fn nan_stays_in_its_column() {
    for engine in engines() {
        for format in ["fp8", "mxfp8", "mxfp4"] {
            let mut spec = small(96, 64, 2, 1);
            spec.precision.experts = WeightFormat::named(format);
            let mut weights = Weights::random(&spec, 3).rounded(&spec);
            let name = if format == "mxfp4" {
                "experts.down.scale"
            } else {
                "experts.down.weight"
            };
            let tensor = weights.0.get_mut(name).unwrap();
            // Of the first row of the second expert.
            let first = tensor.data.len() / 2;
            tensor.data[first] = if format == "mxfp4" {
                // The first of a word's four scales; NaN itself would be a word of zeros.
                f64::from((tensor.data[first] as i64 as u32 | 0xff) as i32)
            } else {
                f64::from(0x7f)
            };
            Stored::of(spec, weights, 12, 3).check(&engine);
        }
    }
}

/// Fewer columns than a panel has: packing repeats the last one. gcc 12 has made a wrong loop of it,
/// with the flags that people get.
#[test]
fn a_panel_is_wider_than_the_matrix() {
    let formats = ["fp8-row", "fp8", "int8-g128", "int8"].into_iter();
    for (n, engine) in shipped().into_iter().enumerate() {
        for (i, format) in in_turns(n, formats.clone().enumerate()) {
            let mut spec = of_type(DType::Bf16, small([6, 63][i % 2], 2 + i, 2, 1));
            spec.experts.form = ExpertForm::Plain;
            spec.precision.expert_activations = [None, Some(ActivationFormat::Int8)][i % 2];
            Stored::random(&spec, format, 5, i as u64).check(&engine);
        }
    }
}

/// The format of a table in a spec.
fn custom(fields: &str) -> Option<WeightFormat> {
    let format = serde_json::from_str(&format!(r#"{{"custom":{{{fields}}}}}"#));
    Some(format.expect("a format"))
}

/// Packing looks for NaN in bytes and writes words of the same record. gcc 12 has left the words out,
/// with the flags that people get.
#[test]
fn second_scales_lie_beside_bytes() {
    let e4m3 = r#""code":"e4m3","block":[3,8],"scale":"int8","second":0,"offset":"zero""#;
    let uint8 = r#""code":"uint8","block":[2,96],"scale":"e4m3","second":192,"offset":"zero""#;
    for engine in shipped() {
        for (i, (format, [d, h])) in [(e4m3, [7, 64]), (uint8, [384, 63])]
            .into_iter()
            .enumerate()
        {
            let mut spec = of_type([DType::F16, DType::Bf16][i], small(d, h, 2, 1));
            spec.precision.experts = custom(format);
            spec.precision.experts_down = Some(WeightFormat::named("int8").expect("a name"));
            Stored::sampled(spec, 5, i as u64).check(&engine);
        }
    }
}

/// A scale of E4M3 is decoded smaller than it is; its zero points are multiplied by all of it.
#[test]
fn zero_points_meet_scales_of_e4m3() {
    for engine in engines() {
        let code = ["uint4", "int8", "e2m1"];
        for (i, code) in code.into_iter().enumerate() {
            let fields = r#","block":[1,16],"scale":"e4m3","second":0,"offset":"zero""#;
            let mut spec = of_type([DType::Bf16, DType::F32][i % 2], small(48, 33, 2, 1));
            spec.precision.experts = custom(&format!(r#""code":"{code}"{fields}"#));
            Stored::sampled(spec, 9, i as u64).check(&engine);
        }
    }
}

/// Groups of rows have sizes that follow from a call's tokens; each has a kernel of its own.
#[test]
fn a_token_has_the_same_bits_in_calls_of_any_size() {
    let formats = ["q4_0", "int4-g64", "nvfp4"].into_iter().enumerate();
    for (n, engine) in shipped().into_iter().enumerate() {
        for (i, format) in in_turns(n, formats.clone()) {
            let mut spec = small(160, 96, 1, 1);
            spec.precision.expert_activations = [None, Some(ActivationFormat::Int8)][i % 2];
            let stored = Stored::random(&spec, format, 33, i as u64);
            let layer = stored.layer(&engine).unwrap();
            let x: Vec<f32> = stored.plain.input.x.iter().map(|x| *x as f32).collect();
            let y = |tokens: usize| {
                let mut y = vec![0.0f32; tokens * 160];
                layer.forward_into(&x[..tokens * 160], &mut y).unwrap();
                y
            };
            let all = y(33);
            for tokens in 1..33 {
                let differs = y(tokens).iter().zip(&all).any(|(a, b)| a != b);
                assert!(!differs, "{format}: {tokens} tokens on {}", engine.target());
            }
        }
    }
}
