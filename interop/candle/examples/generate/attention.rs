//! Attention with a cache, in candle's operations.

use crate::config::{Config, Family, LayerConfig};
use crate::rope::Turns;
use crate::weights::Weights;
use candle_core::{D, Device, Module, Result, Tensor};
use candle_nn::Linear;
use candle_nn::kv_cache::KvCache;
use candle_nn::ops::{rms_norm, softmax_last_dim};

/// The attention of one layer, with the keys and values of the tokens so far.
#[derive(Clone, Debug)]
pub struct Attention {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    norms: Option<Norms>,
    /// A score per head that takes its share of the softmax and adds nothing (gpt-oss).
    sinks: Option<Tensor>,
    clip: Option<f64>,
    window: Option<usize>,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    cache: KvCache,
}

/// The norms of queries and keys.
#[derive(Clone, Debug)]
struct Norms {
    q: Tensor,
    k: Tensor,
    eps: f32,
    /// Whether each head is normed by itself (Qwen3), not all together (OLMoE).
    per_head: bool,
}

impl Attention {
    /// Reads the attention of a layer. The cache has room for `context` tokens, and grows.
    ///
    /// # Errors
    /// A tensor is missing or misshapen.
    pub fn load(
        config: &Config,
        layer: LayerConfig,
        context: usize,
        weights: &Weights<'_>,
    ) -> Result<Attention> {
        let (hidden, dim) = (config.hidden_size, config.head_dim);
        let (queries, keys) = (config.heads * dim, config.kv_heads * dim);
        let norms = |per_head, q: usize, k: usize| -> Result<Option<Norms>> {
            Ok(Some(Norms {
                q: weights.get("q_norm.weight", &[q])?,
                k: weights.get("k_norm.weight", &[k])?,
                eps: config.eps,
                per_head,
            }))
        };
        Ok(Attention {
            q: weights.linear("q_proj", hidden, queries)?,
            k: weights.linear("k_proj", hidden, keys)?,
            v: weights.linear("v_proj", hidden, keys)?,
            o: weights.linear("o_proj", queries, hidden)?,
            norms: match config.family {
                Family::Qwen3Moe => norms(true, dim, dim)?,
                Family::Olmoe => norms(false, queries, keys)?,
                Family::Mixtral | Family::GptOss => None,
            },
            sinks: match config.family {
                Family::GptOss => Some(weights.get("sinks", &[config.heads])?),
                _ => None,
            },
            clip: config.clip_qkv,
            window: layer.window,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: dim,
            cache: KvCache::new(1, context),
        })
    }

    /// Returns the number of tokens in the cache.
    pub fn cached(&self) -> usize {
        self.cache.current_seq_len()
    }

    /// Attends from `x [tokens, hidden]`, the tokens that follow the cached ones, to all of them.
    ///
    /// # Errors
    /// A shape is another one.
    pub fn forward(&mut self, x: &Tensor, turns: &Turns) -> Result<Tensor> {
        let (tokens, before) = (x.dim(0)?, self.cached());
        let norms = self.norms.as_ref();
        let (q_norm, k_norm) = (norms.map(|n| &n.q), norms.map(|n| &n.k));
        let q = self.project(&self.q, q_norm, self.heads, x)?;
        let k = self.project(&self.k, k_norm, self.kv_heads, x)?;
        let v = self.project(&self.v, None, self.kv_heads, x)?;
        let by_head = |heads: &Tensor| heads.transpose(0, 1)?.contiguous();
        let (q, k) = (by_head(&turns.apply(&q)?)?, by_head(&turns.apply(&k)?)?);
        let (k, v) = self.cache.append(&k, &by_head(&v)?)?;
        // The queries that share a key head are rows of one matrix, so that keys are not repeated.
        let shared = self.heads / self.kv_heads;
        let rows = (self.kv_heads, shared * tokens, self.head_dim);
        let scale = 1.0 / (self.head_dim as f64).sqrt();
        let scores = (q.reshape(rows)?.matmul(&k.t()?)? * scale)?;
        let scores = scores.reshape((self.kv_heads, shared, tokens, ()))?;
        let scores = match mask(tokens, before, self.window)? {
            Some(mask) => scores.broadcast_add(&mask)?,
            None => scores,
        };
        let shares = self.shares(&scores)?;
        let shares = shares.reshape((self.kv_heads, shared * tokens, before + tokens))?;
        let y = shares.matmul(&v)?.reshape((self.heads, tokens, ()))?;
        self.o.forward(&y.transpose(0, 1)?.flatten_from(1)?)
    }

    /// Projects tokens to heads `[tokens, heads, head_dim]`.
    fn project(
        &self,
        to: &Linear,
        norm: Option<&Tensor>,
        heads: usize,
        x: &Tensor,
    ) -> Result<Tensor> {
        let mut y = to.forward(x)?;
        let shape = (x.dim(0)?, heads, self.head_dim);
        if let Some((norm, norms)) = norm.zip(self.norms.as_ref()) {
            let whole = match norms.per_head {
                true => y.reshape(shape)?,
                false => y,
            };
            y = rms_norm(&whole, norm, norms.eps)?;
        }
        if let Some(most) = self.clip {
            y = y.clamp(-most, most)?;
        }
        y.reshape(shape)
    }

    /// Returns the softmax of scores `[kv_heads, shared, tokens, all]`.
    fn shares(&self, scores: &Tensor) -> Result<Tensor> {
        let Some(sinks) = &self.sinks else {
            return softmax_last_dim(scores);
        };
        let (kv_heads, shared, tokens, all) = scores.dims4()?;
        let sinks = sinks.reshape((kv_heads, shared, 1, 1))?;
        let sinks = sinks.broadcast_as((kv_heads, shared, tokens, 1))?;
        let shares = softmax_last_dim(&Tensor::cat(&[scores, &sinks.contiguous()?], D::Minus1)?)?;
        shares.narrow(D::Minus1, 0, all)?.contiguous()
    }
}

/// Returns what is added to the scores of `tokens` after `before` others: 0 for a token that is
/// seen, else -inf. `None` if every token sees all.
fn mask(tokens: usize, before: usize, window: Option<usize>) -> Result<Option<Tensor>> {
    let all = before + tokens;
    if tokens == 1 && window.is_none_or(|window| all <= window) {
        return Ok(None);
    }
    let seen = |from: usize, to: usize| to <= from && window.is_none_or(|w| to + w > from);
    let row = |from: usize| {
        (0..all).map(move |to| match seen(from, to) {
            true => 0.0,
            false => f32::NEG_INFINITY,
        })
    };
    let values: Vec<f32> = (before..all).flat_map(row).collect();
    Tensor::from_vec(values, (tokens, all), &Device::Cpu).map(Some)
}
