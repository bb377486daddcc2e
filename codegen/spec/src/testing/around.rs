//! Draws of experts' activations and limits, and of what surrounds routed experts.

use super::{SampleRng, width};
use crate::*;

/// Gives one layer in ten a custom activation, without disturbing its other draws.
pub(super) fn expression(seed: u64, experts: &mut Experts) {
    let rng = &mut SampleRng::new(!seed);
    let own = [
        "x * sigmoid(1.7 * x)",
        "max(x, 0.1 * x)",
        "x * tanh(softplus(x))",
        "where(x < 0, exp(x) - 1, x)",
        "min(relu(x), 6)^2 / 6",
        "x / (1 + abs(x)) + 0.5 * erf(x)",
        "log(1 + x^2) + x / sqrt(x^2 + 1)",
    ];
    if rng.one_in(10)
        && let Ok(expression) = Expression::parse(rng.pick(&own))
    {
        experts.activation = Activation::Custom(expression);
        experts.alpha = 1.0;
    }
}

/// Draws soft caps of up, clamps of shared experts alone, and clamps behind the activation.
pub(super) fn limits(seed: u64, spec: &mut LayerSpec) {
    let rng = &mut SampleRng::new(seed ^ 0x11b1_7ed0);
    if spec.experts.form == ExpertForm::Plain {
        return;
    }
    spec.experts.up_softcap = rng.one_in(4).then(|| rng.pick(&[25.0, 0.8]));
    for shared in &mut spec.shared {
        shared.clamp = rng.one_in(3).then(|| rng.pick(&[0.0, 0.6, 16.0]));
    }
    let clamps = |index: usize| spec.shared_experts(index).clamp.is_some();
    let clamped = spec.experts.clamp.is_some() || (0..spec.shared.len()).any(clamps);
    if clamped && rng.one_in(2) {
        spec.experts.clamp_on = ClampSite::Output;
    }
}

/// Gives every other shared expert an activation of its own.
pub(super) fn own_activations(seed: u64, spec: &mut LayerSpec) {
    let rng = &mut SampleRng::new(seed ^ 0xac71_7a70);
    let mut own = vec![Activation::Silu, Activation::Gelu, Activation::GeluTanh];
    own.extend([Activation::Relu, Activation::Relu2]);
    own.extend(Expression::parse("x * sigmoid(1.7 * x)").map(Activation::Custom));
    for shared in &mut spec.shared {
        shared.activation = rng.one_in(2).then(|| rng.pick(&own));
    }
}

/// Makes a shared expert residual in one of four layers that have some.
pub(super) fn residual(seed: u64, spec: &mut LayerSpec) {
    let rng = &mut SampleRng::new(seed.rotate_left(48));
    if let Some(last) = spec.shared.last_mut()
        && rng.one_in(4)
    {
        last.gate = SharedGate::Residual;
    }
}

/// Gives one layer in eight projections around its routed experts.
pub(super) fn latent(seed: u64, spec: &mut LayerSpec) {
    let rng = &mut SampleRng::new(seed.rotate_left(16));
    spec.latent = rng.one_in(8).then(|| Latent {
        dim: width(rng),
        bias: rng.one_in(2),
        // Large, because rounding alone decides the norm of a sum that is next to nothing.
        norm_eps: rng.one_in(2).then(|| rng.pick(&[0.05, 1.0])),
        input_norm_eps: None,
    });
}

/// Normalises what experts read in every other layer with projections, and the outputs of experts
/// in one of six layers whose weights act on outputs.
pub(super) fn norms(seed: u64, spec: &mut LayerSpec) {
    let rng = &mut SampleRng::new(seed ^ 0x4e0f_2a1d);
    if let Some(latent) = &mut spec.latent {
        latent.input_norm_eps = rng.one_in(2).then(|| rng.pick(&[0.05, 1.0]));
    }
    if spec.router.weight_on == WeightSite::Output && rng.one_in(6) {
        spec.experts.output_norm_eps = Some(rng.pick(&[0.05, 1.0]));
    }
}

/// Gives some projections biases and others none, without disturbing the other draws.
pub(super) fn biases(seed: u64, spec: &mut LayerSpec) {
    let rng = &mut SampleRng::new(seed.rotate_left(32));
    let all = [Biases::None, Biases::Up, Biases::Down, Biases::All];
    if spec.experts.bias == Biases::All && rng.one_in(2) {
        spec.experts.bias = rng.pick(&all[1..3]);
    }
    for shared in &mut spec.shared {
        shared.bias = rng.one_in(2).then(|| rng.pick(&all));
    }
}
