//! The dense twin of an expert layer: one feed-forward network with as much arithmetic per token as
//! the experts of a token.

use super::common::feed_forward::FeedForward;
use super::common::ops::{Linear, Module, Param, relu, relu_backward};
use moesaic::EngineError;
use moesaic::reference::Random;

/// `down · relu(up · x + b) + b`.
pub struct Dense {
    up: Linear,
    down: Linear,
    /// Input and hidden rows of the last forward pass.
    kept: (Vec<f32>, Vec<f32>),
}

impl Dense {
    /// Returns a network of a width and an inner width; `gain` scales the last map.
    pub fn new(width: usize, hidden: usize, gain: f64, random: &mut Random) -> Dense {
        Dense {
            up: Linear::new(width, hidden, 1.0, random),
            down: Linear::new(hidden, width, gain, random),
            kept: Default::default(),
        }
    }
}

impl FeedForward for Dense {
    fn forward(&mut self, x: Vec<f32>) -> Result<Vec<f32>, EngineError> {
        let mut hidden = self.up.forward(&x);
        relu(&mut hidden);
        let y = self.down.forward(&hidden);
        self.kept = (x, hidden);
        Ok(y)
    }

    fn backward(&mut self, dy: &[f32]) -> Result<Vec<f32>, EngineError> {
        let (x, hidden) = &self.kept;
        let mut dhidden = self.down.backward(hidden, dy);
        relu_backward(hidden, &mut dhidden);
        Ok(self.up.backward(x, &dhidden))
    }
}

impl Module for Dense {
    fn params<'a>(&'a mut self, prefix: &str, visit: &mut dyn FnMut(String, &'a mut Param)) {
        self.up.params(&format!("{prefix}.up"), visit);
        self.down.params(&format!("{prefix}.down"), visit);
    }
}
