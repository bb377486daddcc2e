//! The input of the router.

use crate::math::dot;
use crate::rng::{Purpose, Stream, below, jitter};
use crate::{Input, Weights};
use moesaic_spec::{LayerSpec, RouterInput};

/// Returns the factors `[d]` on the channels of token `t` before the router reads it: uniform in
/// `1 ± jitter`, times zero or `1 / (1 - input_dropout)`.
pub fn input_factors(spec: &LayerSpec, input: &Input, t: usize) -> Vec<f64> {
    let r = &spec.router;
    let mut factors = vec![1.0; spec.shape.model_dim];
    let Some(draw) = input.draw else {
        return factors;
    };
    if r.jitter > 0.0 {
        let stream = Stream::new(draw, Purpose::Jitter);
        for (i, factor) in factors.iter_mut().enumerate() {
            *factor *= f64::from(jitter(stream.word(t, i), r.jitter as f32));
        }
    }
    if r.input_dropout > 0.0 {
        let stream = Stream::new(draw, Purpose::Dropout);
        for (i, factor) in factors.iter_mut().enumerate() {
            *factor *= if below(stream.word(t, i), r.input_dropout as f32) {
                0.0
            } else {
                1.0 / (1.0 - r.input_dropout)
            };
        }
    }
    factors
}

/// Returns the input of the router's projection for token `t`. In training it is jittered and has
/// channels dropped. It is then divided by its root mean square if the spec asks for that.
pub fn router_input(spec: &LayerSpec, weights: &Weights, input: &Input, t: usize) -> Vec<f64> {
    let d = spec.shape.model_dim;
    let factors = input_factors(spec, input, t);
    let x = input.x[t * d..(t + 1) * d].iter().zip(&factors);
    let x: Vec<f64> = x.map(|(x, f)| x * f).collect();
    match spec.router.input {
        RouterInput::Token => x,
        RouterInput::RmsScaled => rms_scaled(&x, &weights.get("router.input_scale").data),
    }
}

fn rms_scaled(x: &[f64], scale: &[f64]) -> Vec<f64> {
    let d = x.len() as f64;
    let rms = (dot(x, x) / d + 1e-6).sqrt();
    x.iter()
        .zip(scale)
        .map(|(v, s)| v / rms * s / d.sqrt())
        .collect()
}
