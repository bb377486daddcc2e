//! The scores of experts.

use crate::math::{sigmoid, softmax, softplus};
use moesaic_spec::{LayerSpec, Score};

/// Returns the scores of all experts of one token, or the logits if only selected experts have
/// scores.
pub(crate) fn scores_row(spec: &LayerSpec, logits: &[f64]) -> Vec<f64> {
    match spec.router.score {
        Score::Softmax => softmax(logits),
        Score::Sigmoid => logits.iter().map(|&z| sigmoid(z)).collect(),
        Score::SqrtSoftplus => logits.iter().map(|&z| softplus(z).sqrt()).collect(),
        Score::SoftmaxSelected | Score::One => logits.to_vec(),
    }
}
