//! Rotary embeddings: plain, linearly scaled, and YaRN.

use candle_core::{Device, Result, Tensor};
use std::f64::consts::PI;

/// The frequencies of a model.
#[derive(Clone, Debug)]
pub struct Rope {
    pub theta: f64,
    /// The factor by which positions are divided.
    pub linear: f64,
    pub yarn: Option<Yarn>,
}

/// YaRN (arXiv 2309.00071): low frequencies are divided by a factor, high ones stay.
#[derive(Clone, Debug)]
pub struct Yarn {
    pub factor: f64,
    /// The context that the model was trained with before.
    pub original: f64,
    /// The number of turns in that context from which a frequency stays as it is.
    pub beta_fast: f64,
    /// The number of turns below which a frequency is divided by the whole factor.
    pub beta_slow: f64,
    /// Whether the two limits are rounded to whole frequencies.
    pub truncate: bool,
    pub attention_factor: Option<f64>,
    /// `mscale` and `mscale_all_dim`.
    pub mscale: Option<(f64, f64)>,
}

impl Yarn {
    /// Returns the number that cosines and sines are multiplied by.
    fn scale(&self) -> f64 {
        let scale = |mscale: f64| match self.factor > 1.0 {
            true => 0.1 * mscale * self.factor.ln() + 1.0,
            false => 1.0,
        };
        let (one, all) = self.mscale.unwrap_or_default();
        let given = (one != 0.0 && all != 0.0).then(|| scale(one) / scale(all));
        self.attention_factor
            .or(given)
            .unwrap_or_else(|| scale(1.0))
    }

    /// Returns the indices of frequencies between which the division fades in.
    fn range(&self, theta: f64, head_dim: usize) -> (f64, f64) {
        let dim = head_dim as f64;
        let at = |turns: f64| dim * (self.original / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (at(self.beta_fast), at(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(dim - 1.0));
        // Equal limits would divide by zero; transformers has the same number.
        (low, if low == high { high + 0.001 } else { high })
    }
}

/// The cosines and sines of positions, `[positions, head_dim / 2]` each.
#[derive(Clone, Debug)]
pub struct Turns {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    /// Computes the turns of positions from `first` on.
    ///
    /// # Errors
    /// None on a CPU.
    pub fn turns(&self, first: usize, count: usize, head_dim: usize) -> Result<Turns> {
        let (frequencies, scale) = (self.frequencies(head_dim), self.scale());
        let angles = (first..first + count)
            .flat_map(|position| frequencies.iter().map(move |f| position as f32 * f));
        let angles: Vec<f32> = angles.collect();
        let angles = Tensor::from_vec(angles, (count, head_dim / 2), &Device::Cpu)?;
        Ok(Turns {
            cos: (angles.cos()? * scale)?,
            sin: (angles.sin()? * scale)?,
        })
    }

    fn scale(&self) -> f64 {
        self.yarn.as_ref().map_or(1.0, Yarn::scale)
    }

    fn frequencies(&self, head_dim: usize) -> Vec<f32> {
        let range = self.yarn.as_ref().map(|y| y.range(self.theta, head_dim));
        let of = |index: usize| {
            let exponent = 2.0 * index as f64 / head_dim as f64;
            let plain = 1.0 / (self.theta.powf(exponent) * self.linear);
            let Some((yarn, (low, high))) = self.yarn.as_ref().zip(range) else {
                return plain as f32;
            };
            let divided = ((index as f64 - low) / (high - low)).clamp(0.0, 1.0);
            (plain * (1.0 - divided) + plain / yarn.factor * divided) as f32
        };
        (0..head_dim / 2).map(of).collect()
    }
}

impl Turns {
    /// Turns heads `[tokens, heads, head_dim]`.
    ///
    /// # Errors
    /// A shape is another one.
    pub fn apply(&self, heads: &Tensor) -> Result<Tensor> {
        let heads = heads.unsqueeze(0)?.contiguous()?;
        candle_nn::rotary_emb::rope_thd(&heads, &self.cos, &self.sin)?.squeeze(0)
    }
}
