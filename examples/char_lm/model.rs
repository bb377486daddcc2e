//! A pre-norm Transformer over characters with given feed-forward layers: experts or their dense
//! twin.

use super::attention::{self, Attention, Shape};
use super::common::feed_forward::FeedForward;
use super::common::ops::{LayerNorm, Linear, Module, Normalized, Param, add, cross_entropy};
use super::text::Batch;
use moesaic::EngineError;
use moesaic::reference::Random;

/// One attention and one feed-forward layer, each on a residual branch.
struct Block<F> {
    norms: [LayerNorm; 2],
    attention: Attention,
    feed_forward: F,
}

/// The state of a block between forward and backward.
struct Kept {
    norms: [Normalized; 2],
    attention: attention::Saved,
}

/// The whole model.
pub struct Model<F> {
    characters: Param,
    positions: Param,
    blocks: Vec<Block<F>>,
    norm: LayerNorm,
    head: Linear,
    shape: Shape,
}

impl<F: FeedForward> Block<F> {
    fn forward(&mut self, mut x: Vec<f32>) -> Result<(Vec<f32>, Kept), EngineError> {
        let (normed, first) = self.norms[0].forward(&x);
        let (mixed, attention) = self.attention.forward(normed);
        add(&mut x, &mixed);
        let (normed, second) = self.norms[1].forward(&x);
        add(&mut x, &self.feed_forward.forward(normed)?);
        let kept = Kept {
            norms: [first, second],
            attention,
        };
        Ok((x, kept))
    }

    fn backward(&mut self, kept: &Kept, mut dx: Vec<f32>) -> Result<Vec<f32>, EngineError> {
        let inner = self.feed_forward.backward(&dx)?;
        add(&mut dx, &self.norms[1].backward(&kept.norms[1], &inner));
        let inner = self.attention.backward(&kept.attention, &dx);
        add(&mut dx, &self.norms[0].backward(&kept.norms[0], &inner));
        Ok(dx)
    }
}

impl<F: FeedForward> Model<F> {
    /// Returns a model with random weights from `seed`; `layers` gives one feed-forward layer per
    /// block. Two models of one seed and depth differ only in those.
    pub fn new(vocabulary: usize, shape: Shape, layers: Vec<F>, seed: u64) -> Model<F> {
        let mut random = Random::new(seed);
        let gain = 1.0 / (2.0 * layers.len() as f64).sqrt();
        let width = shape.width;
        let block = |feed_forward| Block {
            norms: [LayerNorm::new(width), LayerNorm::new(width)],
            attention: Attention::new(shape, gain, &mut random),
            feed_forward,
        };
        let blocks = layers.into_iter().map(block).collect();
        Model {
            characters: Param::uniform(vocabulary * width, 0.1, &mut random),
            positions: Param::uniform(shape.context * width, 0.1, &mut random),
            blocks,
            norm: LayerNorm::new(width),
            head: Linear::new(width, vocabulary, 0.5, &mut random),
            shape,
        }
    }

    /// Returns the mean cross entropy of a batch, in nats per character; for a part of a batch, its
    /// share.
    pub fn loss(&mut self, batch: &Batch) -> Result<f64, EngineError> {
        let mut x = self.embed(&batch.tokens);
        for block in &mut self.blocks {
            x = block.forward(x)?.0;
        }
        let logits = self.head.forward(&self.norm.forward(&x).0);
        Ok(cross_entropy(logits, &batch.targets, batch.all).0)
    }

    /// Returns the loss, and computes the gradient of every parameter.
    pub fn gradients(&mut self, batch: &Batch) -> Result<f64, EngineError> {
        let mut x = self.embed(&batch.tokens);
        let mut kept = Vec::new();
        for block in &mut self.blocks {
            let (y, saved) = block.forward(x)?;
            (x, _) = (y, kept.push(saved));
        }
        let (normed, saved) = self.norm.forward(&x);
        let (loss, dlogits) = cross_entropy(self.head.forward(&normed), &batch.targets, batch.all);
        let dnormed = self.head.backward(&normed, &dlogits);
        let mut dx = self.norm.backward(&saved, &dnormed);
        for (block, kept) in self.blocks.iter_mut().zip(&kept).rev() {
            dx = block.backward(kept, dx)?;
        }
        self.unembed(&batch.tokens, &dx);
        Ok(loss)
    }

    /// Returns the sum of a character's vector and its position's.
    fn embed(&self, tokens: &[usize]) -> Vec<f32> {
        let d = self.shape.width;
        let mut x = Vec::with_capacity(tokens.len() * d);
        for (i, &token) in tokens.iter().enumerate() {
            x.extend_from_slice(&self.characters.value[token * d..][..d]);
            let place = i % self.shape.context;
            add(&mut x[i * d..], &self.positions.value[place * d..][..d]);
        }
        x
    }

    fn unembed(&mut self, tokens: &[usize], dx: &[f32]) {
        let d = self.shape.width;
        self.characters.grad.fill(0.0);
        self.positions.grad.fill(0.0);
        for (i, (dx, &token)) in dx.chunks_exact(d).zip(tokens).enumerate() {
            add(&mut self.characters.grad[token * d..][..d], dx);
            let place = i % self.shape.context;
            add(&mut self.positions.grad[place * d..][..d], dx);
        }
    }
}

impl<F: FeedForward> Module for Model<F> {
    fn params<'a>(&'a mut self, prefix: &str, visit: &mut dyn FnMut(String, &'a mut Param)) {
        visit(format!("{prefix}characters"), &mut self.characters);
        visit(format!("{prefix}positions"), &mut self.positions);
        for (i, block) in self.blocks.iter_mut().enumerate() {
            let name = format!("{prefix}block{i}");
            let [first, second] = &mut block.norms;
            first.params(&format!("{name}.norm0"), visit);
            block.attention.params(&format!("{name}.attention"), visit);
            second.params(&format!("{name}.norm1"), visit);
            block
                .feed_forward
                .params(&format!("{name}.feed_forward"), visit);
        }
        self.norm.params(&format!("{prefix}norm"), visit);
        self.head.params(&format!("{prefix}head"), visit);
    }
}
