//! The RMS norm of the routed experts' sum.

use crate::Weights;
use crate::math::dot;
use moesaic_spec::LayerSpec;

/// The name of the norm's weight.
pub(crate) const WEIGHT: &str = "latent.norm.weight";

/// Returns `x / sqrt(mean(x²) + eps) ⊙ weight`, or x itself in a layer without a norm.
pub(crate) fn normed(spec: &LayerSpec, weights: &Weights, x: &[f64]) -> Vec<f64> {
    let Some(inverse) = inverse_rms(spec, x) else {
        return x.to_vec();
    };
    let scales = weights.get(WEIGHT).data.iter();
    x.iter().zip(scales).map(|(v, w)| v * inverse * w).collect()
}

/// Returns the gradients of x and of the norm's weight from that of [`normed`]; the latter is
/// `None` in a layer without a norm.
pub(crate) fn normed_back(
    spec: &LayerSpec,
    weights: &Weights,
    x: &[f64],
    dout: &[f64],
) -> (Vec<f64>, Option<Vec<f64>>) {
    let Some(inverse) = inverse_rms(spec, x) else {
        return (dout.to_vec(), None);
    };
    let scales = weights.get(WEIGHT).data.iter();
    let scaled: Vec<f64> = dout.iter().zip(scales).map(|(d, w)| d * w).collect();
    let along = dot(&scaled, x) / x.len() as f64 * inverse * inverse;
    let dx = scaled.iter().zip(x).map(|(g, v)| (g - v * along) * inverse);
    let dweight = dout.iter().zip(x).map(|(d, v)| d * v * inverse);
    (dx.collect(), Some(dweight.collect()))
}

fn inverse_rms(spec: &LayerSpec, x: &[f64]) -> Option<f64> {
    let eps = spec.latent.as_ref()?.norm_eps?;
    Some(1.0 / (dot(x, x) / x.len() as f64 + eps).sqrt())
}
