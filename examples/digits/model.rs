//! A classifier of residual expert layers: each image is one token.

use super::common::feed_forward::FeedForward;
use super::common::ops::{LayerNorm, Linear, Module, Normalized, Param, add, cross_entropy};
use super::images::{Images, PIXELS};
use moesaic::EngineError;
use moesaic::reference::Random;

/// A classifier: pixels to a row of `width`, residual layers, ten scores.
pub struct Classifier<F> {
    stem: Linear,
    blocks: Vec<(LayerNorm, F)>,
    norm: LayerNorm,
    head: Linear,
}

/// The state of a forward pass.
struct Passed {
    /// `[images, 10]`.
    scores: Vec<f32>,
    /// The input of the head.
    normed: Vec<f32>,
    /// The state of each block's norm, and of the last one.
    norms: Vec<Normalized>,
}

impl<F: FeedForward> Classifier<F> {
    /// Returns a classifier with random weights around the given layers.
    pub fn new(width: usize, layers: Vec<F>, seed: u64) -> Classifier<F> {
        let mut random = Random::new(seed);
        let block = |layer| (LayerNorm::new(width), layer);
        Classifier {
            stem: Linear::new(PIXELS, width, 1.7, &mut random),
            blocks: layers.into_iter().map(block).collect(),
            norm: LayerNorm::new(width),
            head: Linear::new(width, 10, 0.5, &mut random),
        }
    }

    fn forward(&mut self, images: &Images) -> Result<Passed, EngineError> {
        let mut x = self.stem.forward(&images.pixels);
        let mut norms = Vec::new();
        for (norm, layer) in &mut self.blocks {
            let (normed, saved) = norm.forward(&x);
            add(&mut x, &layer.forward(normed)?);
            norms.push(saved);
        }
        let (normed, saved) = self.norm.forward(&x);
        norms.push(saved);
        Ok(Passed {
            scores: self.head.forward(&normed),
            normed,
            norms,
        })
    }

    /// Returns the mean cross entropy in nats, and computes the gradient of every parameter.
    pub fn gradients(&mut self, images: &Images) -> Result<f64, EngineError> {
        let passed = self.forward(images)?;
        let (loss, dscores) = cross_entropy(passed.scores, &images.labels, images.labels.len());
        let (last, norms) = passed.norms.split_last().expect("one more than blocks");
        let dnormed = self.head.backward(&passed.normed, &dscores);
        let mut dx = self.norm.backward(last, &dnormed);
        for ((norm, layer), saved) in self.blocks.iter_mut().zip(norms).rev() {
            let inner = layer.backward(&dx)?;
            add(&mut dx, &norm.backward(saved, &inner));
        }
        self.stem.backward(&images.pixels, &dx);
        Ok(loss)
    }

    /// Returns the share of images whose highest score is their label's.
    pub fn accuracy(&mut self, images: &Images) -> Result<f64, EngineError> {
        let scores = self.forward(images)?.scores;
        let best = scores.chunks_exact(10).map(|row| {
            let order = |a: &usize, b: &usize| row[*a].total_cmp(&row[*b]);
            (0..10).max_by(order).expect("ten scores")
        });
        let hits = best.zip(&images.labels).filter(|(a, b)| a == *b).count();
        Ok(hits as f64 / images.labels.len() as f64)
    }
}

impl<F: FeedForward> Module for Classifier<F> {
    fn params<'a>(&'a mut self, prefix: &str, visit: &mut dyn FnMut(String, &'a mut Param)) {
        self.stem.params(&format!("{prefix}stem"), visit);
        for (i, (norm, layer)) in self.blocks.iter_mut().enumerate() {
            norm.params(&format!("{prefix}norm{i}"), visit);
            layer.params(&format!("{prefix}layer{i}"), visit);
        }
        self.norm.params(&format!("{prefix}norm"), visit);
        self.head.params(&format!("{prefix}head"), visit);
    }
}
