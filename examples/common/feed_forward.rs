//! What stands between two attentions or norms.

use super::ops::Module;
use moesaic::EngineError;

/// A differentiable layer over rows.
pub trait FeedForward: Module {
    /// `x [T, d]` to the same shape; keeps what `backward` needs.
    fn forward(&mut self, x: Vec<f32>) -> Result<Vec<f32>, EngineError>;

    /// From the gradient of the last output to that of its input; leaves the
    /// gradients of its parameters in them.
    fn backward(&mut self, dy: &[f32]) -> Result<Vec<f32>, EngineError>;
}
