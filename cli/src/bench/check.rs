//! A check of the results before they are timed.

use crate::failure::{Failure, Result};
use crate::random;
use crate::run::relative_error;
use crate::timing;
use moesaic::reference;
use moesaic::reference::rng::Draw;
use moesaic::{DType, Input, Layer, LayerSpec, Tensor, Tensors};

const TOKENS: usize = 2;

/// Runs two tokens, and returns the largest error of `y` relative to its largest element.
///
/// # Errors
/// Fails if the result is wrong, because timing a wrong layer has no point.
pub fn check(layer: &Layer, spec: &LayerSpec, weights: &Tensors<'_>) -> Result<f64> {
    let call = random::input(spec, TOKENS);
    let found: Vec<f64> = timing::y(layer, &call)?
        .to_f32()
        .into_iter()
        .map(f64::from)
        .collect();
    let trains = layer.plan().training.is_some();
    let error = relative_error(&found, &expected(spec, weights, &call, trains));
    let allowed = if spec.precision.tf32 {
        8.0 * 2f64.powi(-11)
    } else {
        tolerance(spec.precision.activations)
    };
    if error > allowed {
        return Err(Failure::work(format!(
            "the layer is wrong: y is off by {error:.1e} of its largest element, {allowed:.0e} is allowed"
        ))
        .hint("please report it with the spec and the output of `moesaic doctor -v`"));
    }
    Ok(error)
}

/// Returns the allowed relative error: roundings of hidden rows, expert rows and output. Weights
/// add none, because the reference gets them as they are stored.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-4,
        other => 8.0 * other.unit_roundoff(),
    }
}

/// Returns the reference's `y`, with the random numbers of training if the layer trains.
fn expected(spec: &LayerSpec, weights: &Tensors<'_>, call: &Input<'_>, trains: bool) -> Vec<f64> {
    let floats = |name| call.tensors.get(name).map(Tensor::to_f64);
    let ints = |name| call.tensors.get(name).and_then(|t| t.to_vec::<i32>());
    let input = reference::Input {
        tokens: call.tokens,
        x: floats("x").unwrap_or_default(),
        token_ids: ints("token_ids"),
        routing: ints("topk_ids").zip(floats("topk_weights")),
        token_mask: ints("token_mask"),
        active_k: ints("active_k").map(|k| k[0].max(0) as usize),
        draw: trains.then(Draw::default),
        ..reference::Input::default()
    };
    reference::y_of_few(spec, weights, &input)
}
