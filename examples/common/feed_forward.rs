//! The layer between two attentions or norms.

use super::ops::Module;
use moesaic::EngineError;

/// A differentiable layer over rows.
pub trait FeedForward: Module {
    /// Maps `x [T, d]` to the same shape, and keeps the state for `backward`.
    fn forward(&mut self, x: Vec<f32>) -> Result<Vec<f32>, EngineError>;

    /// Turns the gradient of the last output into that of its input, and stores the gradients of
    /// the parameters in them.
    fn backward(&mut self, dy: &[f32]) -> Result<Vec<f32>, EngineError>;
}
