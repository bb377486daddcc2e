//! Small numeric functions.

use moesaic_kernel::DType;
use moesaic_tensor::round_float;
use std::cmp::Ordering;

/// Orders larger values first, and NaN last.
///
/// Equal values compare equal, so a stable sort keeps the lower index first.
pub fn descending(a: f64, b: f64) -> Ordering {
    match (a.is_nan(), b.is_nan()) {
        (true, true) => Ordering::Equal,
        (true, false) => Ordering::Greater,
        (false, true) => Ordering::Less,
        (false, false) => b.partial_cmp(&a).unwrap_or(Ordering::Equal),
    }
}

/// Returns the indices of `values`, best first: larger value, then lower index, NaN last.
pub fn rank(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| descending(values[a], values[b]));
    order
}

/// Returns `exp(v - max) / sum`.
pub fn softmax(values: &[f64]) -> Vec<f64> {
    let top = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exps: Vec<f64> = values.iter().map(|v| (v - top).exp()).collect();
    let sum: f64 = exps.iter().sum();
    exps.iter().map(|e| e / sum).collect()
}

/// Returns `1 / (1 + e⁻ˣ)`.
pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns `ln(1 + eˣ)`, without overflow.
pub(crate) fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Computes `sum += factor · row`.
pub(crate) fn add(sum: &mut [f64], row: &[f64], factor: f64) {
    assert_eq!(sum.len(), row.len());
    sum.iter_mut().zip(row).for_each(|(s, v)| *s += factor * v);
}

/// Returns the sum of products.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// Returns the error function, to about 1e-15.
pub fn erf(x: f64) -> f64 {
    let size = x.abs();
    if size < 2.5 {
        erf_series(x)
    } else {
        x.signum() * (1.0 - erfc_fraction(size))
    }
}

/// Sums `2/√π · e^(-x²) · Σ 2ⁿ x^(2n+1) / (1·3·5…(2n+1))`, whose terms all have one sign.
fn erf_series(x: f64) -> f64 {
    let mut term = x;
    let mut sum = x;
    for n in 1..120 {
        term *= 2.0 * x * x / (2 * n + 1) as f64;
        sum += term;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

/// Evaluates the continued fraction of the complement, for large x.
fn erfc_fraction(x: f64) -> f64 {
    let tail = (1..200).rev().fold(x, |tail, k| x + 0.5 * k as f64 / tail);
    (-x * x).exp() / (tail * std::f64::consts::PI.sqrt())
}

/// Returns the value after storage as `dtype`: rounded to nearest, ties to even.
pub fn round_to(dtype: DType, value: f64) -> f64 {
    match dtype {
        DType::F32 | DType::F16 | DType::Bf16 => round_float(dtype, value),
        DType::I32 | DType::I64 => value.round(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The middle rounds to the even number; the next f64 above the middle rounds up.
    #[test]
    fn the_nearest_number_is_taken() {
        for (dtype, digits) in [(DType::F16, 10), (DType::Bf16, 7), (DType::F32, 23)] {
            let step = 0.5f64.powi(digits);
            let middle = 1.0 + 0.5 * step;
            let least = f64::EPSILON;
            assert_eq!(round_to(dtype, middle), 1.0, "{dtype}");
            assert_eq!(round_to(dtype, middle + least), 1.0 + step, "{dtype}");
            assert_eq!(round_to(dtype, middle - least), 1.0, "{dtype}");
            let next = middle + step;
            assert_eq!(round_to(dtype, next), 1.0 + 2.0 * step, "{dtype}");
            assert_eq!(round_to(dtype, next - least), 1.0 + step, "{dtype}");
            assert_eq!(round_to(dtype, -middle - least), -1.0 - step, "{dtype}");
            assert!(round_to(dtype, f64::NAN).is_nan(), "{dtype}");
            assert_eq!(round_to(dtype, f64::INFINITY), f64::INFINITY, "{dtype}");
        }
    }
}
