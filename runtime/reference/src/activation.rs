//! The activations of experts.

use crate::expression;
use crate::math::{erf, sigmoid};
use moesaic_spec::{Activation, Experts};

/// Returns φ and its derivative.
pub(crate) fn phi(experts: &Experts, x: f64) -> (f64, f64) {
    let positive = f64::from(x > 0.0);
    let relu = if x < 0.0 { 0.0 } else { x };
    match &experts.activation {
        Activation::Silu => {
            let s = sigmoid(experts.alpha * x);
            (x * s, s + experts.alpha * x * s * (1.0 - s))
        }
        Activation::Gelu => {
            let normal = 0.5 * (1.0 + erf(x / 2f64.sqrt()));
            let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
            (x * normal, normal + x * density)
        }
        Activation::GeluTanh => {
            let root = (2.0 / std::f64::consts::PI).sqrt();
            let tanh = (root * (x + 0.044715 * x * x * x)).tanh();
            let inner = root * (1.0 + 3.0 * 0.044715 * x * x);
            let half = 0.5 * (1.0 + tanh);
            (x * half, half + 0.5 * x * (1.0 - tanh * tanh) * inner)
        }
        Activation::Relu => (relu, positive),
        Activation::Relu2 => (relu * relu, if x > 0.0 { 2.0 * x } else { 0.0 }),
        Activation::Custom(expression) => expression::evaluate(expression, x),
    }
}
