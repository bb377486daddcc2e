//! Metadata of GGUF files in, layer specs and tensor recipes out.
//!
//! [`import`] reads the keys and tensor names that llama.cpp's convert script writes. It returns
//! the spec of one MoE layer with a recipe for each canonical tensor, as
//! [`hf::import`](crate::hf::import) does for a `config.json`. To do so it translates the keys into
//! those of the transformers family that the architecture was converted from, and lets that
//! function read them. Nothing here opens a file.

mod architectures;
mod error;
mod recipes;
mod write;

pub use error::GgufError;
pub use write::{architecture_for, check_keys, keys_for, tensor_name, written_families};

use crate::hf::{self, Import};
use crate::{LayerSpec, Renormalize, Score};
use architectures::Architecture;
use moesaic_kernel::DType;
use serde_json::{Map, json};
use std::collections::BTreeMap;

/// Types of plain numbers in GGUF files. The types of blocks are [`BLOCKS`](crate::format::BLOCKS).
pub const NUMBERS: [DType; 5] = [DType::F32, DType::F16, DType::Bf16, DType::I32, DType::I64];

/// Returns ggml's number of a type of plain numbers.
pub const fn number_id(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::I32 => 26,
        DType::I64 => 27,
        DType::Bf16 => 30,
    }
}

/// The metadata of a GGUF file, or of the first file of a split model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    /// Values by key. Lists are kept as their length alone.
    pub values: BTreeMap<String, GgufValue>,
    /// Shape and type of each tensor.
    pub tensors: BTreeMap<String, TensorInfo>,
}

/// A tensor of a GGUF file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// The element type; `None` for blocks of codes.
    pub dtype: Option<DType>,
}

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    /// A whole number.
    Int(i64),
    /// A number.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// A string.
    Text(String),
    /// A list, by its number of values.
    List(u64),
}

/// Imports layer `layer` from a GGUF file's metadata.
///
/// # Errors
///
/// [`GgufError`] if the architecture is not supported, a key is missing, the layer has no experts,
/// or the layer has a tensor that no recipe reads.
pub fn import(metadata: &Metadata, layer: usize) -> Result<Import, GgufError> {
    let (name, architecture) = architecture(metadata)?;
    let layers = layers(metadata);
    if !layers.contains(&layer) {
        return Err(GgufError::NoExperts {
            architecture: name.to_string(),
            layer,
            layers,
        });
    }
    let block = Block {
        metadata,
        architecture: name,
        layer,
    };
    let (model_type, own) = (architecture.build)(&block)?;
    let mut config = block.config(model_type)?;
    config.extend(own);
    let mut imported = hf::import(&serde_json::Value::Object(config).to_string(), layer)?;
    block.adjust(&mut imported.spec)?;
    imported.spec.name = format!("{name}-layer{layer}");
    imported.sources = recipes::sources(&imported.spec, &block)?;
    if block.dtype().is_none() {
        imported.notes.push(hf::QUANTIZED_NOTE.to_string());
    }
    imported.spec.validate().map_err(|problems| {
        let problems: Vec<String> = problems.iter().map(|p| p.to_string()).collect();
        hf::HfError::Invalid {
            model: name.to_string(),
            problems: problems.join("; "),
        }
    })?;
    Ok(imported)
}

/// Returns the layers with experts, ascending.
///
/// # Errors
///
/// [`GgufError::NoArchitecture`] or [`GgufError::UnknownArchitecture`].
pub fn moe_layers(metadata: &Metadata) -> Result<Vec<usize>, GgufError> {
    architecture(metadata)?;
    Ok(layers(metadata))
}

/// Returns every architecture that [`import`] reads, by llama.cpp's names.
pub fn supported() -> Vec<&'static str> {
    architectures::ALL.iter().map(|a| a.name).collect()
}

fn architecture(metadata: &Metadata) -> Result<(&str, &'static Architecture), GgufError> {
    let Some(GgufValue::Text(name)) = metadata.values.get("general.architecture") else {
        return Err(GgufError::NoArchitecture);
    };
    let found = architectures::ALL.iter().find(|a| a.name == name.as_str());
    let found = found.ok_or_else(|| GgufError::UnknownArchitecture {
        name: name.chars().take(60).collect(),
        supported: supported(),
    })?;
    Ok((name, found))
}

/// Returns the layers that have a router.
fn layers(metadata: &Metadata) -> Vec<usize> {
    let number = |name: &String| -> Option<usize> {
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        (rest == "ffn_gate_inp.weight").then(|| layer.parse().ok())?
    };
    let mut layers: Vec<usize> = metadata.tensors.keys().filter_map(number).collect();
    layers.sort_unstable();
    layers
}

/// One layer of a file.
struct Block<'a> {
    metadata: &'a Metadata,
    architecture: &'a str,
    layer: usize,
}

impl Block<'_> {
    /// Returns the name of a tensor of the layer.
    fn name(&self, end: &str) -> String {
        format!("blk.{}.{end}", self.layer)
    }

    fn tensor(&self, end: &str) -> Option<&TensorInfo> {
        self.metadata.tensors.get(&self.name(end))
    }

    fn value(&self, key: &str) -> Option<(String, &GgufValue)> {
        let key = format!("{}.{key}", self.architecture);
        let value = self.metadata.values.get(&key)?;
        Some((key, value))
    }

    fn bad(&self, key: String, found: &GgufValue, expected: &str) -> GgufError {
        GgufError::BadKey {
            key,
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }

    /// Returns a whole number.
    fn size(&self, key: &str) -> Result<Option<usize>, GgufError> {
        match self.value(key) {
            None => Ok(None),
            Some((_, GgufValue::Int(value))) if (0..=1 << 30).contains(value) => {
                Ok(usize::try_from(*value).ok())
            }
            Some((key, value)) => Err(self.bad(key, value, "a whole number")),
        }
    }

    fn need(&self, key: &str) -> Result<usize, GgufError> {
        self.size(key)?.ok_or_else(|| GgufError::MissingKey {
            key: format!("{}.{key}", self.architecture),
        })
    }

    fn number(&self, key: &str) -> Result<Option<f64>, GgufError> {
        match self.value(key) {
            None => Ok(None),
            Some((_, GgufValue::Float(value))) => Ok(Some(*value)),
            Some((_, GgufValue::Int(value))) => Ok(Some(*value as f64)),
            Some((key, value)) => Err(self.bad(key, value, "a number")),
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, GgufError> {
        match self.value(key) {
            None => Ok(None),
            Some((_, GgufValue::Bool(value))) => Ok(Some(*value)),
            Some((key, value)) => Err(self.bad(key, value, "true or false")),
        }
    }

    /// Returns the element type of the experts, if they are not blocks of codes.
    fn dtype(&self) -> Option<DType> {
        let down = self.tensor("ffn_down_exps.weight");
        let down = down.or_else(|| self.tensor("ffn_down.0.weight"));
        down.and_then(|info| info.dtype).filter(|d| d.is_float())
    }

    /// Returns the width of an expert, taken from its tensors.
    fn hidden(&self) -> Result<usize, GgufError> {
        let ends = ["ffn_down_exps.weight", "ffn_down.0.weight"];
        let found = ends.iter().find_map(|end| self.tensor(end));
        let hidden = found.and_then(|info| info.shape.last());
        let hidden = hidden.ok_or_else(|| GgufError::MissingTensor {
            tensor: self.name(ends[0]),
        })?;
        match self.size("expert_feed_forward_length")? {
            Some(said) if said != 0 && said != *hidden => Err(GgufError::BadKey {
                key: format!("{}.expert_feed_forward_length", self.architecture),
                found: said.to_string(),
                expected: format!("{hidden}, as `{}` has it", self.name(ends[0])),
            }),
            _ => Ok(*hidden),
        }
    }

    /// Returns the width of the shared expert, if the layer has one.
    fn shared(&self) -> Option<usize> {
        self.tensor("ffn_down_shexp.weight")?.shape.last().copied()
    }

    /// Returns the keys that all families have.
    fn config(&self, model_type: &str) -> Result<Map<String, serde_json::Value>, GgufError> {
        let (experts, hidden) = (self.need("expert_count")?, self.hidden()?);
        let top_k = self.need("expert_used_count")?;
        let dtype = match self.dtype() {
            Some(DType::F32) => "float32",
            Some(DType::F16) => "float16",
            _ => "bfloat16",
        };
        let config = json!({
            "model_type": model_type,
            "torch_dtype": dtype,
            "hidden_size": self.need("embedding_length")?,
            "num_hidden_layers": self.layer + 1,
            "first_k_dense_replace": 0,
            "num_experts": experts,
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": hidden,
            "intermediate_size": hidden,
        });
        match config {
            serde_json::Value::Object(config) => Ok(config),
            _ => Ok(Map::new()),
        }
    }

    /// Overrides the family's router and shared experts with what the file itself states.
    fn adjust(&self, spec: &mut LayerSpec) -> Result<(), GgufError> {
        let router = &mut spec.router;
        let score = match self.size("expert_gating_func")? {
            None | Some(0) => router.score,
            Some(1) => Score::Softmax,
            Some(2) => Score::Sigmoid,
            Some(3) => Score::SoftmaxSelected,
            Some(other) => {
                let key = format!("{}.expert_gating_func", self.architecture);
                let found = GgufValue::Int(other as i64);
                return Err(self.bad(key, &found, "1 (softmax), 2 (sigmoid) or 3 (of the chosen)"));
            }
        };
        router.score = score;
        match self.flag("expert_weights_norm")? {
            Some(true) if router.renormalize == Renormalize::None => {
                router.renormalize = Renormalize::Sum;
            }
            Some(false) => router.renormalize = Renormalize::None,
            _ => {}
        }
        if let Some(scale) = self.number("expert_weights_scale")?.filter(|s| *s != 0.0) {
            // The file holds f32, and a scale of 2.827 should not become 2.8269999027.
            router.scale = shortest(scale);
        }
        let biases = ["exp_probs_b.bias", "exp_probs_b"];
        router.select_bias = biases.iter().any(|end| self.tensor(end).is_some());
        if let (Some(width), [shared, ..]) = (self.shared(), spec.shared.as_mut_slice()) {
            shared.hidden_dim = width;
        }
        Ok(())
    }
}

/// Returns the number of fewest digits that rounds to the same f32.
fn shortest(value: f64) -> f64 {
    (value as f32).to_string().parse().unwrap_or(value)
}

impl std::fmt::Display for GgufValue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            GgufValue::Int(value) => write!(f, "{value}"),
            GgufValue::Float(value) => write!(f, "{value}"),
            GgufValue::Bool(value) => write!(f, "{value}"),
            GgufValue::Text(value) => write!(f, "{:?}", value.chars().take(60).collect::<String>()),
            GgufValue::List(count) => write!(f, "a list of {count}"),
        }
    }
}
