//! The choice of the next token.

use candle_core::{Result, Tensor};
use candle_nn::ops::softmax_last_dim;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token.
    pub temperature: f64,
    /// The number of likeliest tokens that are considered.
    pub top_k: Option<usize>,
    /// The share of probability that the considered tokens have together.
    pub top_p: Option<f64>,
    pub seed: u64,
}

/// A source of tokens: the same options and logits give the same tokens.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    state: u64,
}

impl Sampler {
    pub fn new(sampling: Sampling) -> Sampler {
        let state = sampling.seed;
        Sampler { sampling, state }
    }

    /// Chooses a token by its logits `[vocabulary]`.
    ///
    /// # Errors
    /// The logits are of another shape.
    pub fn next(&mut self, logits: &Tensor) -> Result<u32> {
        let Sampling {
            temperature, top_k, ..
        } = self.sampling;
        if temperature == 0.0 {
            return logits.argmax(0)?.to_scalar();
        }
        let shares = softmax_last_dim(&(logits / temperature)?)?.to_vec1::<f32>()?;
        let mut ids: Vec<u32> = (0..shares.len() as u32).collect();
        ids.sort_by(|a, b| shares[*b as usize].total_cmp(&shares[*a as usize]));
        ids.truncate(top_k.unwrap_or(ids.len()).max(1));
        let share = |id: &u32| f64::from(shares[*id as usize]);
        let whole: f64 = ids.iter().map(share).sum();
        if let Some(top_p) = self.sampling.top_p {
            let mut sum = 0.0;
            // The token that reaches the share counts, so there is always one.
            let before = ids.iter().take_while(|id| {
                let needed = sum < top_p * whole;
                sum += share(id);
                needed
            });
            let kept = before.count();
            ids.truncate(kept.max(1));
        }
        let whole: f64 = ids.iter().map(share).sum();
        let mut left = self.uniform() * whole;
        let chosen = ids.iter().find(|id| {
            left -= share(id);
            left < 0.0
        });
        // Rounding may leave a rest behind the last token.
        Ok(*chosen.or(ids.last()).expect("a vocabulary has tokens"))
    }

    /// Returns the next number in [0, 1) of SplitMix64.
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
