//! One layer of a GGUF file, with its keys and tensors.

use super::GgufError;
use super::metadata::{GgufValue, Metadata, TensorInfo};
use crate::{LayerSpec, Renormalize, Score};
use moesaic_kernel::DType;
use serde_json::{Map, json};

/// One layer of a file.
pub(super) struct Block<'a> {
    pub metadata: &'a Metadata,
    pub architecture: &'a str,
    pub layer: usize,
}

impl Block<'_> {
    /// Returns the name of a tensor of the layer.
    pub fn name(&self, end: &str) -> String {
        format!("blk.{}.{end}", self.layer)
    }

    pub fn tensor(&self, end: &str) -> Option<&TensorInfo> {
        self.metadata.tensors.get(&self.name(end))
    }

    pub fn value(&self, key: &str) -> Option<(String, &GgufValue)> {
        let key = format!("{}.{key}", self.architecture);
        let value = self.metadata.values.get(&key)?;
        Some((key, value))
    }

    pub fn bad(&self, key: String, found: &GgufValue, expected: &str) -> GgufError {
        GgufError::BadKey {
            key,
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }

    /// Returns a whole number.
    pub fn size(&self, key: &str) -> Result<Option<usize>, GgufError> {
        match self.value(key) {
            None => Ok(None),
            Some((_, GgufValue::Int(value))) if (0..=1 << 30).contains(value) => {
                Ok(usize::try_from(*value).ok())
            }
            Some((key, value)) => Err(self.bad(key, value, "a whole number")),
        }
    }

    pub fn need(&self, key: &str) -> Result<usize, GgufError> {
        self.size(key)?.ok_or_else(|| GgufError::MissingKey {
            key: format!("{}.{key}", self.architecture),
        })
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>, GgufError> {
        match self.value(key) {
            None => Ok(None),
            Some((_, GgufValue::Float(value))) => Ok(Some(*value)),
            Some((_, GgufValue::Int(value))) => Ok(Some(*value as f64)),
            Some((key, value)) => Err(self.bad(key, value, "a number")),
        }
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, GgufError> {
        match self.value(key) {
            None => Ok(None),
            Some((_, GgufValue::Bool(value))) => Ok(Some(*value)),
            Some((key, value)) => Err(self.bad(key, value, "true or false")),
        }
    }

    /// Returns the element type of the experts, if they are not blocks of codes.
    pub fn dtype(&self) -> Option<DType> {
        let down = self.tensor("ffn_down_exps.weight");
        let down = down.or_else(|| self.tensor("ffn_down.0.weight"));
        down.and_then(|info| info.dtype).filter(|d| d.is_float())
    }

    /// Returns the width of an expert, taken from its tensors.
    pub fn hidden(&self) -> Result<usize, GgufError> {
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
    pub fn shared(&self) -> Option<usize> {
        self.tensor("ffn_down_shexp.weight")?.shape.last().copied()
    }

    /// Returns the keys that all families have.
    pub fn config(&self, model_type: &str) -> Result<Map<String, serde_json::Value>, GgufError> {
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
    pub fn adjust(&self, spec: &mut LayerSpec) -> Result<(), GgufError> {
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
