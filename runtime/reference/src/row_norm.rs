//! The RMS norms around routed experts: of what they read, of each output, of their sum.

use crate::Weights;
use crate::math::dot;
use moesaic_spec::LayerSpec;

/// A norm of rows. Its weight multiplies a row after it was divided, or before.
#[derive(Clone, Copy)]
pub(crate) struct RowNorm {
    /// The name of its weight.
    pub weight: &'static str,
    eps: f64,
    scales_first: bool,
}

/// The gradients of a norm.
pub(crate) struct NormGradients {
    /// That of the row.
    pub x: Vec<f64>,
    /// That of the norm's weight.
    pub weight: Vec<f64>,
}

impl RowNorm {
    /// Returns the norm of the projected token, before experts read it.
    pub fn of_input(spec: &LayerSpec) -> Option<RowNorm> {
        let eps = spec.latent.as_ref()?.input_norm_eps?;
        Some(RowNorm {
            weight: "latent.input_norm.weight",
            eps,
            scales_first: false,
        })
    }

    /// Returns the norm of an expert's output.
    pub fn of_output(spec: &LayerSpec) -> Option<RowNorm> {
        Some(RowNorm {
            weight: "expert_norm.weight",
            eps: spec.experts.output_norm_eps?,
            scales_first: true,
        })
    }

    /// Returns the norm of the weighted sum of experts' outputs.
    pub fn of_sum(spec: &LayerSpec) -> Option<RowNorm> {
        let eps = spec.latent.as_ref()?.norm_eps?;
        Some(RowNorm {
            weight: "latent.norm.weight",
            eps,
            scales_first: false,
        })
    }

    /// Returns `x / sqrt(mean(x²) + eps) ⊙ weight`, or the same of `x ⊙ weight` without that factor.
    pub fn of(&self, weights: &Weights, x: &[f64]) -> Vec<f64> {
        let scales = &weights.get(self.weight).data;
        let (divided, factors) = self.split(scales, x);
        let inverse = self.inverse(&divided);
        let rows = divided.iter().zip(factors);
        rows.map(|(v, w)| v * inverse * w).collect()
    }

    /// Returns the gradients from that of [`RowNorm::of`].
    pub fn back(&self, weights: &Weights, x: &[f64], dout: &[f64]) -> NormGradients {
        let scales = &weights.get(self.weight).data;
        let (divided, factors) = self.split(scales, x);
        let inverse = self.inverse(&divided);
        let scaled: Vec<f64> = dout.iter().zip(factors).map(|(d, w)| d * w).collect();
        let along = dot(&scaled, &divided) / x.len() as f64 * inverse * inverse;
        let rows = scaled.iter().zip(&divided);
        let ddivided: Vec<f64> = rows.map(|(g, v)| (g - v * along) * inverse).collect();
        let product =
            |a: &[f64], b: &[f64]| -> Vec<f64> { a.iter().zip(b).map(|(a, b)| a * b).collect() };
        if self.scales_first {
            return NormGradients {
                x: product(&ddivided, scales),
                weight: product(&ddivided, x),
            };
        }
        let weight = dout.iter().zip(x).map(|(d, v)| d * v * inverse);
        NormGradients {
            weight: weight.collect(),
            x: ddivided,
        }
    }

    /// Returns the row that is divided, and the factors on the quotients.
    fn split(&self, scales: &[f64], x: &[f64]) -> (Vec<f64>, Vec<f64>) {
        if self.scales_first {
            let scaled = x.iter().zip(scales).map(|(v, w)| v * w);
            (scaled.collect(), vec![1.0; x.len()])
        } else {
            (x.to_vec(), scales.to_vec())
        }
    }

    fn inverse(&self, x: &[f64]) -> f64 {
        1.0 / (dot(x, x) / x.len() as f64 + self.eps).sqrt()
    }
}

/// Returns x through a norm, or x itself without one.
pub(crate) fn through(norm: Option<RowNorm>, weights: &Weights, x: Vec<f64>) -> Vec<f64> {
    match norm {
        Some(norm) => norm.of(weights, &x),
        None => x,
    }
}
