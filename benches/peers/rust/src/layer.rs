//! The sizes and the weights' file, which both layers share.

use crate::Result;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde::Deserialize;
use std::path::Path;

/// `layer.json`.
#[derive(Clone, Deserialize)]
pub struct Layer {
    pub dtype: String,
    pub model_dim: usize,
    pub hidden_dim: usize,
    pub experts: usize,
    pub top_k: usize,
    /// `silu`, `clamped` or `relu`.
    pub activation: String,
    /// Without gate.
    pub plain: bool,
    /// `softmax`, `softmax-selected` or `sigmoid`.
    pub score: String,
    pub renormalize: bool,
    pub scale: f32,
    pub shared_dim: usize,
}

impl Layer {
    pub fn read(folder: &Path) -> Result<Layer> {
        let text = std::fs::read_to_string(folder.join("layer.json"))?;
        Ok(serde_json::from_str(&text)?)
    }

    /// Rows of the first product: gate and up, or up alone.
    pub fn inner(&self) -> usize {
        self.hidden_dim * if self.plain { 1 } else { 2 }
    }

    /// The name of the first product's tensors.
    pub fn first(&self, what: &str) -> String {
        let name = if self.plain { "up" } else { "gate_up" };
        format!("experts.{name}.{what}")
    }

    /// Experts and weights of a token from its logits: higher first.
    pub fn choose(&self, logits: &mut [f32], select_bias: Option<&[f32]>) -> Vec<(usize, f32)> {
        match self.score.as_str() {
            "softmax" => softmax(logits),
            "sigmoid" => logits
                .iter_mut()
                .for_each(|z| *z = 1.0 / (1.0 + (-*z).exp())),
            _ => {}
        }
        let key = |e: usize| logits[e] + select_bias.map_or(0.0, |bias| bias[e]);
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.select_nth_unstable_by(self.top_k - 1, |a, b| key(*b).total_cmp(&key(*a)));
        order.truncate(self.top_k);
        let mut weights: Vec<f32> = order.iter().map(|e| logits[*e]).collect();
        if self.score == "softmax-selected" {
            softmax(&mut weights);
        } else if self.renormalize {
            let sum: f32 = weights.iter().sum();
            weights.iter_mut().for_each(|w| *w /= sum);
        }
        let scaled = weights.iter().map(|w| w * self.scale);
        order.iter().copied().zip(scaled).collect()
    }
}

fn softmax(values: &mut [f32]) {
    let most = values.iter().copied().fold(f32::MIN, f32::max);
    values.iter_mut().for_each(|v| *v = (*v - most).exp());
    let sum: f32 = values.iter().sum();
    values.iter_mut().for_each(|v| *v /= sum);
}

/// The tensors of `weights.safetensors`.
pub struct Files<'a>(SafeTensors<'a>);

impl<'a> Files<'a> {
    pub fn new(bytes: &'a [u8]) -> Result<Files<'a>> {
        Ok(Files(SafeTensors::deserialize(bytes)?))
    }

    /// A tensor, if the layer has it.
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        self.0.tensor(name).ok()
    }

    pub fn need(&self, name: &str) -> Result<TensorView<'_>> {
        Ok(self.0.tensor(name)?)
    }
}

/// The values of an f32 tensor.
pub fn floats(view: &TensorView<'_>) -> Vec<f32> {
    let chunks = view.data().chunks_exact(4);
    chunks
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect()
}
