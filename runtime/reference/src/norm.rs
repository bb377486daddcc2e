//! The denominator of renormalization.

use moesaic_spec::{Renormalize, Router};

/// Returns the denominator.
pub(crate) fn denominator(r: &Router, scores: &[f64]) -> f64 {
    let sum: f64 = scores.iter().sum();
    match r.renormalize {
        Renormalize::None => 1.0,
        Renormalize::Sum => sum + r.renormalize_eps,
        // Unlike max, this keeps a NaN.
        Renormalize::Clamp if sum < r.renormalize_eps => r.renormalize_eps,
        Renormalize::Clamp => sum,
        Renormalize::PNorm => {
            let powers = scores.iter().map(|s| s.abs().powf(r.norm_order));
            powers.sum::<f64>().powf(1.0 / r.norm_order)
        }
    }
}

/// Returns the derivative of [`denominator`] by each score.
pub(crate) fn denominator_slopes(r: &Router, scores: &[f64]) -> Vec<f64> {
    let all = |slope| vec![slope; scores.len()];
    match r.renormalize {
        Renormalize::None => all(0.0),
        Renormalize::Sum => all(1.0),
        Renormalize::Clamp if scores.iter().sum::<f64>() < r.renormalize_eps => all(0.0),
        Renormalize::Clamp => all(1.0),
        Renormalize::PNorm => {
            let norm = denominator(r, scores);
            let slope = |s: &f64| (s.abs() / norm).powf(r.norm_order - 1.0) * s.signum();
            scores.iter().map(slope).collect()
        }
    }
}
