//! A model: attention and norms by candle, experts by moesaic.

use crate::attention::Attention;
use crate::config::{Config, LayerConfig};
use crate::weights::Weights;
use candle_core::{DType, Device, Error, Module, Result, Tensor};
use candle_nn::ops::{rms_norm, silu};
use candle_nn::{Embedding, Linear};
use moesaic::Engine;
use moesaic::weights::Checkpoint;
use moesaic_candle::InferenceLayer;
use std::path::Path;

/// A model with the cache of one text. Clones share the weights, and their texts go on from here.
#[derive(Clone, Debug)]
pub struct Model {
    config: Config,
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: Tensor,
    head: Linear,
}

/// One layer.
#[derive(Clone, Debug)]
struct Block {
    attention_norm: Tensor,
    attention: Attention,
    norm: Tensor,
    network: Network,
}

/// The feed-forward part of a layer.
#[derive(Clone, Debug)]
enum Network {
    Experts(InferenceLayer),
    Dense {
        gate: Linear,
        up: Linear,
        down: Linear,
    },
}

impl Model {
    /// Loads a folder in the form of transformers. The cache has room for `context` tokens, and
    /// grows.
    ///
    /// # Errors
    /// A file or a tensor is missing, or the model is not of a family that this program runs.
    pub fn load(engine: &Engine, folder: &Path, context: usize) -> Result<Model> {
        let config = Config::read(folder)?;
        let checkpoint = Checkpoint::open(folder).map_err(Error::wrap)?;
        let top = Weights::new(&checkpoint);
        let weights = top.below("model");
        let hidden = config.hidden_size;
        let embedding = weights.get("embed_tokens.weight", &[config.words, hidden])?;
        let layers = config.layers.iter().enumerate();
        let blocks = layers.map(|(at, layer)| {
            let network = match layer.experts {
                true => Network::Experts(InferenceLayer::from_hf(engine, folder, at)?),
                false => Network::dense(&config, &weights.below(&format!("layers.{at}.mlp")))?,
            };
            let weights = weights.below(&format!("layers.{at}"));
            Block::load(&config, *layer, context, network, &weights)
        });
        let blocks = blocks.collect::<Result<_>>()?;
        let head = match config.tied {
            true => embedding.clone(),
            false => top.get("lm_head.weight", &[config.words, hidden])?,
        };
        Ok(Model {
            norm: weights.get("norm.weight", &[hidden])?,
            embedding: Embedding::new(embedding, hidden),
            head: Linear::new(head, None),
            blocks,
            config,
        })
    }

    /// Returns the options of the model outside its experts.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Runs tokens that follow those before, and returns their states `[tokens, hidden]`.
    ///
    /// # Errors
    /// A token is not of the vocabulary.
    pub fn forward(&mut self, tokens: &[u32]) -> Result<Tensor> {
        let words = self.config.words;
        if let Some(token) = tokens.iter().find(|token| **token as usize >= words) {
            candle_core::bail!("token {token} is none of the model's {words}");
        }
        let before = self.blocks.first().map_or(0, |b| b.attention.cached());
        let (rope, dim) = (&self.config.rope, self.config.head_dim);
        let turns = rope.turns(before, tokens.len(), dim)?;
        let mut x = self
            .embedding
            .forward(&Tensor::new(tokens, &Device::Cpu)?)?;
        for block in &mut self.blocks {
            let normed = rms_norm(&x, &block.attention_norm, self.config.eps)?;
            x = (&x + block.attention.forward(&normed, &turns)?)?;
            let normed = rms_norm(&x, &block.norm, self.config.eps)?;
            x = (&x + block.network.forward(&normed)?)?;
        }
        rms_norm(&x, &self.norm, self.config.eps)
    }

    /// Returns the logits `[tokens, vocabulary]` of states.
    ///
    /// # Errors
    /// A shape is another one.
    pub fn logits(&self, states: &Tensor) -> Result<Tensor> {
        self.head.forward(states)
    }
}

impl Block {
    fn load(
        config: &Config,
        layer: LayerConfig,
        context: usize,
        network: Network,
        weights: &Weights<'_>,
    ) -> Result<Block> {
        let hidden = config.hidden_size;
        let attention = weights.below("self_attn");
        Ok(Block {
            attention_norm: weights.get("input_layernorm.weight", &[hidden])?,
            attention: Attention::load(config, layer, context, &attention)?,
            norm: weights.get("post_attention_layernorm.weight", &[hidden])?,
            network,
        })
    }
}

impl Network {
    fn dense(config: &Config, weights: &Weights<'_>) -> Result<Network> {
        let Some(inner) = config.inner_size else {
            candle_core::bail!("config.json has no `intermediate_size` for layers without experts")
        };
        let hidden = config.hidden_size;
        Ok(Network::Dense {
            gate: weights.linear("gate_proj", hidden, inner)?,
            up: weights.linear("up_proj", hidden, inner)?,
            down: weights.linear("down_proj", inner, hidden)?,
        })
    }
}

impl Module for Network {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            // Experts compute in their own type, the rest of the model in f32.
            Network::Experts(layer) => {
                let y = layer.forward(&x.to_dtype(layer.dtype())?)?;
                y.to_dtype(DType::F32)
            }
            Network::Dense { gate, up, down } => {
                down.forward(&(silu(&gate.forward(x)?)? * up.forward(x)?)?)
            }
        }
    }
}
