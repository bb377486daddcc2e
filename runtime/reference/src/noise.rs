//! Random changes in training: to the router's input, and to its logits.

use crate::math::{dot, softplus};
use crate::rng::{Draw, Purpose, Stream, gaussian, gumbel, scaled};
use crate::router_input::router_input;
use crate::{Input, Weights};
use moesaic_spec::{LayerSpec, NoiseKind};

/// Returns `noise / E`, the scale of gaussian noise.
pub fn gaussian_scale(spec: &LayerSpec) -> f32 {
    (spec.router.noise / spec.routed_experts() as f64) as f32
}

/// Returns a standard normal deviate for expert `e` of token `t`.
pub(crate) fn deviate(draw: Draw, t: usize, e: usize) -> f64 {
    let stream = Stream::new(draw, Purpose::Noise);
    f64::from(scaled(gaussian(stream.word(t, e)), 1.0))
}

/// Returns the input of the learned noise scale: `x · Wₙᵀ` per expert, with x the router's input.
pub(crate) fn noise_logits(spec: &LayerSpec, weights: &Weights, x: &[f64]) -> Vec<f64> {
    let matrix = weights.get("router.noise.weight");
    (0..spec.routed_experts())
        .map(|e| dot(matrix.outer(e), x))
        .collect()
}

/// Returns `noise · (softplus(a) + 1e-2)`, the standard deviation of learned noise.
fn scale_of(spec: &LayerSpec, a: f64) -> f64 {
    spec.router.noise * (softplus(a) + 1e-2)
}

/// Returns the standard deviations of learned noise `[T, E + identity]`.
pub(crate) fn noise_scale(spec: &LayerSpec, weights: &Weights, input: &Input) -> Option<Vec<f64>> {
    let row = |t: usize| {
        let x = router_input(spec, weights, input, t);
        let scales = noise_logits(spec, weights, &x).into_iter();
        scales.map(|a| scale_of(spec, a)).collect::<Vec<f64>>()
    };
    spec.learned_noise()
        .then(|| (0..input.tokens).flat_map(row).collect())
}

/// Returns the noise on the logits of token `t`, for the kinds that weights see too. `x` is the
/// router's input.
pub(crate) fn logit_noise(
    spec: &LayerSpec,
    weights: &Weights,
    input: &Input,
    t: usize,
    x: &[f64],
) -> Vec<f64> {
    let experts = 0..spec.routed_experts();
    let Some(draw) = input.draw.filter(|_| spec.noisy_logits()) else {
        return vec![0.0; experts.len()];
    };
    if spec.learned_noise() {
        let scales = noise_logits(spec, weights, x);
        return experts
            .map(|e| scale_of(spec, scales[e]) * deviate(draw, t, e))
            .collect();
    }
    let (stream, scale) = (Stream::new(draw, Purpose::Noise), gaussian_scale(spec));
    experts
        .map(|e| f64::from(scaled(gaussian(stream.word(t, e)), scale)))
        .collect()
}

/// Returns the noise that only selection sees `[E]`, if there is any.
pub(crate) fn key_noise(spec: &LayerSpec, input: &Input, t: usize) -> Option<Vec<f64>> {
    let r = &spec.router;
    let kinds = [NoiseKind::Gumbel, NoiseKind::GumbelSecond];
    let draw = input
        .draw
        .filter(|_| r.noise > 0.0 && kinds.contains(&r.noise_kind))?;
    let stream = Stream::new(draw, Purpose::Noise);
    let noise = |e: usize| f64::from(scaled(gumbel(stream.word(t, e)), r.noise as f32));
    Some((0..spec.routed_experts()).map(noise).collect())
}
