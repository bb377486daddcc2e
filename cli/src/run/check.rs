//! Comparison of results with the f64 reference.

use super::input::Tokens;
use moesaic::reference::rng::Draw;
use moesaic::reference::{self, Gradients};
use moesaic::{LayerSpec, Tensor, Tensors};
use std::time::{Duration, Instant};

/// The distance of results from the reference.
pub struct Comparison {
    /// The largest difference in `y`, relative to the largest expected element; `None` if only
    /// routing ran.
    pub y_error: Option<f64>,
    /// The error of the gradient that is furthest off, in the same measure; `None` without
    /// gradients.
    pub gradient_error: Option<f64>,
    /// The number of tokens whose experts differ, order included.
    pub other_experts: usize,
    /// The time that the reference took.
    pub time: Duration,
}

/// Runs the reference on the layer's inputs, with the random numbers of `draw` as in training.
pub fn compare(
    spec: &LayerSpec,
    weights: &Tensors<'_>,
    tokens: &Tokens<'_>,
    draw: Option<Draw>,
    outputs: &Tensors<'_>,
) -> Comparison {
    let started = Instant::now();
    let (spec, weights) = reference::numbers(spec, &reference::Weights::from(weights));
    let (spec, input) = (&spec, input(tokens, draw));
    let expected = reference::forward(spec, &weights, &input);
    let of = |name: &str| outputs.get(name).map(Tensor::to_f64);
    let ids = of("topk_ids").unwrap_or_default();
    let expected_ids: Vec<f64> = expected.topk_ids.iter().map(|&id| f64::from(id)).collect();
    let top_k = spec.shape.top_k.max(1);
    let pairs = ids.chunks(top_k).zip(expected_ids.chunks(top_k));
    let other_experts = pairs.filter(|(found, expected)| found != expected).count();
    let gradients = tokens.get("dy").map(|dy| {
        gradient_error(
            &reference::backward(spec, &weights, &input, &dy.to_f64()),
            of,
        )
    });
    Comparison {
        y_error: of("y").map(|y| relative_error(&y, &expected.y)),
        gradient_error: gradients,
        other_experts,
        time: started.elapsed(),
    }
}

/// Returns the largest error of a gradient, relative to the gradient's largest element.
fn gradient_error(expected: &Gradients, found: impl Fn(&str) -> Option<Vec<f64>>) -> f64 {
    let weights = expected.weights.iter();
    let weights = weights.map(|(name, tensor)| (format!("grad.{name}"), &tensor.data));
    let all = weights.chain([("dx".to_string(), &expected.x)]);
    let error = |(name, expected): (String, &Vec<f64>)| {
        let found = found(&name).unwrap_or(vec![0.0; expected.len()]);
        relative_error(&found, expected)
    };
    all.map(error).fold(0.0, f64::max)
}

fn input(tokens: &Tokens<'_>, draw: Option<Draw>) -> reference::Input {
    let floats = |name| tokens.get(name).map(Tensor::to_f64);
    let ints = |name| tokens.get(name).and_then(|t| t.to_vec::<i32>());
    let longs = |name| tokens.get(name).and_then(|t| t.to_vec::<i64>());
    reference::Input {
        tokens: tokens.count,
        x: floats("x").unwrap_or_default(),
        token_ids: ints("token_ids"),
        routing: ints("topk_ids").zip(floats("topk_weights")),
        token_mask: ints("token_mask"),
        active_k: ints("active_k").map(|k| k[0].max(0) as usize),
        sequence_ids: ints("sequence_ids"),
        global: longs("global_counts").zip(longs("global_tokens").map(|n| n[0] as u64)),
        draw,
        capacity_factor: tokens.capacity_factor,
    }
}

/// Returns the largest difference, relative to the largest finite expected value. Two NaNs are
/// equal; a single NaN is not.
pub fn relative_error(found: &[f64], expected: &[f64]) -> f64 {
    let finite = expected.iter().filter(|v| v.is_finite());
    let scale = finite.fold(0f64, |most, v| most.max(v.abs()));
    let difference = |(f, e): (&f64, &f64)| {
        if f.is_nan() && e.is_nan() || f == e {
            0.0
        } else if (f - e).is_nan() {
            f64::INFINITY
        } else {
            (f - e).abs()
        }
    };
    let worst = found
        .iter()
        .zip(expected)
        .map(difference)
        .fold(0f64, f64::max);
    if scale > 0.0 { worst / scale } else { worst }
}

#[cfg(test)]
mod tests {
    use super::relative_error;

    #[test]
    fn errors_are_relative_and_nan_counts() {
        assert_eq!(relative_error(&[1.0, 2.0], &[1.0, 4.0]), 0.5);
        assert_eq!(relative_error(&[f64::NAN, 1.0], &[f64::NAN, 1.0]), 0.0);
        assert_eq!(relative_error(&[f64::NAN], &[1.0]), f64::INFINITY);
        assert_eq!(relative_error(&[], &[]), 0.0);
    }
}
