//! The arithmetic and traffic that a layer cannot do without.

use crate::pass::Pass;
use crate::shapes::Shape;
use moesaic::DType;
use std::collections::BTreeSet;

/// The least work of a layer, whoever does it. Intermediate tensors are not
/// part of it.
pub struct Work {
    /// Products of experts and router; a multiply-add counts two.
    pub flops: f64,
    /// Weights of experts that have tokens, tokens and outputs, each once a
    /// pass; in backward also the f32 gradients of all experts.
    pub bytes: f64,
}

impl Work {
    pub fn of(shape: &Shape, dtype: DType, tokens: usize, ids: &[i32], pass: Pass) -> Work {
        let matrices = if shape.gated() { 3 } else { 2 };
        let expert = matrices * shape.model_dim * shape.hidden_dim;
        let shared = matrices * shape.model_dim * shape.shared_dim;
        let router = shape.model_dim * shape.experts;
        let active = ids.iter().collect::<BTreeSet<_>>().len();
        let flops = 2 * tokens * (shape.top_k * expert + shared + router);
        let read = (active * expert + shared + router) * dtype.size();
        let rows = 2 * tokens * shape.model_dim * dtype.size();
        let gradients = 4 * (shape.experts * expert + shared + router);
        let (flops, bytes) = match pass {
            Pass::Forward => (flops, read + rows),
            Pass::Both => (3 * flops, 2 * (read + rows) + gradients),
        };
        Work {
            flops: flops as f64,
            bytes: bytes as f64,
        }
    }
}
