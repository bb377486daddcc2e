//! Layers whose experts are codes: every format on every CPU, against the f64 reference of the
//! numbers that the codes stand for.

use super::Case;
use super::cases::{of_type, small};
use super::layers::engines;
use moesaic::reference::{Weights, numbers};
use moesaic::spec::{Biases, LayerSpec, WEIGHT_FORMATS, WeightFormat};
use moesaic::{DType, Engine, EngineError, Layer, Recompute, Training};

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

    fn check(&self, engine: &Engine) {
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
        for (i, format) in WEIGHT_FORMATS.iter().enumerate() {
            // A compiler runs for each layer: formats take turns with shapes and types.
            for j in [n + i, n + i + 2] {
                let (spec, tokens) = shapes()[j % 5].clone();
                let dtype = [DType::F32, DType::Bf16, DType::F16][(i + j) % 3];
                let spec = of_type(dtype, spec);
                Stored::random(&spec, format.name, tokens, (10 * i + j) as u64).check(&engine);
            }
        }
    }
}

/// Depth slices: a sum goes over more than fits into a thread's scratch memory.
#[test]
fn long_rows_are_cut_at_blocks() {
    for engine in engines() {
        for (i, format) in ["fp8", "mxfp4", "q4_k", "nvfp4", "int8"]
            .into_iter()
            .enumerate()
        {
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
                f64::NAN
            } else {
                f64::from(0x7f)
            };
            Stored::of(spec, weights, 12, 3).check(&engine);
        }
    }
}
