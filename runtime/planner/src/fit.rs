//! Least-squares fits of a model's constants, on the logarithm of the error.

/// A measurement with the terms of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// The terms that the model combines with the constants.
    pub terms: Vec<f64>,
    /// The measured seconds.
    pub measured: f64,
}

/// Fitted constants and their error.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// The constants in the order of the terms; none is negative.
    pub constants: Vec<f64>,
    /// The mean absolute relative error.
    pub mean: f64,
    /// The largest absolute relative error.
    pub worst: f64,
}

/// The rounds of coordinate descent; each moves every constant by a factor.
const ROUNDS: usize = 400;

/// Finds nonnegative constants that minimize the sum of squares of `log(predicted / measured)`.
/// `start` holds a positive first guess of each.
///
/// `model` predicts seconds from constants and terms.
pub fn fit(start: &[f64], points: &[Point], model: impl Fn(&[f64], &[f64]) -> f64) -> Fit {
    let loss = |constants: &[f64]| -> f64 {
        let errors = points.iter().map(|point| {
            // The logarithm makes errors of microseconds and of seconds count alike; it needs a
            // positive argument.
            let predicted = model(constants, &point.terms).max(f64::MIN_POSITIVE);
            (predicted / point.measured).ln()
        });
        errors.map(|error| error * error).sum()
    };
    let mut constants = start.to_vec();
    let mut steps = vec![0.5f64; start.len()];
    let mut best = loss(&constants);
    for _ in 0..ROUNDS {
        for at in 0..constants.len() {
            let here = constants[at];
            // Multiplying instead of adding keeps every constant positive, and fits constants of
            // any magnitude.
            let tried = [1.0 + steps[at], 1.0 / (1.0 + steps[at])].map(|by| {
                constants[at] = here * by;
                (loss(&constants), here * by)
            });
            constants[at] = here;
            let (least, value) = if tried[0].0 < tried[1].0 {
                tried[0]
            } else {
                tried[1]
            };
            if least < best {
                (best, constants[at]) = (least, value);
                // Longer steps after a success, shorter ones after a failure: descent without
                // derivatives.
                steps[at] = (steps[at] * 1.3).min(1.0);
            } else {
                steps[at] = (steps[at] * 0.7).max(1e-9);
            }
        }
    }
    judged(constants, points, model)
}

fn judged(constants: Vec<f64>, points: &[Point], model: impl Fn(&[f64], &[f64]) -> f64) -> Fit {
    let errors = points
        .iter()
        .map(|point| (model(&constants, &point.terms) / point.measured - 1.0).abs());
    let errors: Vec<f64> = errors.collect();
    Fit {
        mean: errors.iter().sum::<f64>() / errors.len().max(1) as f64,
        worst: errors.iter().copied().fold(0.0, f64::max),
        constants,
    }
}

/// Fits a line through `(bytes, seconds)`: fixed time in seconds and bandwidth in bytes per
/// second, with their error. With one point or none the fixed time is 0.
pub fn fit_line(measured: &[(f64, f64)]) -> Fit {
    let points: Vec<Point> = measured
        .iter()
        .map(|&(bytes, seconds)| Point {
            terms: vec![1.0, bytes],
            measured: seconds,
        })
        .collect();
    let line = |constants: &[f64], terms: &[f64]| constants[0] * terms[0] + constants[1] * terms[1];
    let least = measured.iter().map(|m| m.1).fold(f64::INFINITY, f64::min);
    let rate = measured.iter().map(|m| m.1 / m.0.max(1.0));
    let rate = rate.fold(f64::INFINITY, f64::min);
    // Half of the shortest time, because every measurement contains the fixed one.
    let start = [(least / 2.0).min(1.0), rate.min(1.0)];
    let mut fit = match measured.len() {
        0 | 1 => judged(vec![0.0, start[1]], &points, line),
        _ => fit(&start, &points, line),
    };
    fit.constants[1] = 1.0 / fit.constants[1];
    fit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_again() {
        let line = |bytes: f64| (bytes, 40e-6 + bytes / 45e9);
        let fit = fit_line(&[1e4, 1e5, 1e6, 1e7, 1e8].map(line));
        assert!((fit.constants[0] / 40e-6 - 1.0).abs() < 1e-3, "{fit:?}");
        assert!((fit.constants[1] / 45e9 - 1.0).abs() < 1e-3, "{fit:?}");
        assert!(fit.worst < 1e-3);
        // A line meets two points exactly.
        let fit = fit_line(&[(3.785e6, 118e-6), (6.623e6, 173e-6)]);
        assert!(fit.worst < 1e-4, "{fit:?}");
    }

    #[test]
    fn errors_of_small_and_large_count_alike() {
        // Errors by a factor of two in either direction cancel out.
        let fit = fit_line(&[(1e3, 2e-6), (1e3, 0.5e-6), (1e9, 1.0)]);
        let at = |bytes: f64| fit.constants[0] + bytes / fit.constants[1];
        assert!((at(1e3) / 1e-6 - 1.0).abs() < 0.02, "{fit:?}");
        assert!((at(1e9) - 1.0).abs() < 0.02, "{fit:?}");
    }

    #[test]
    fn few_points_do_not_break_it() {
        let one = fit_line(&[(2e9, 1.0)]).constants;
        assert!(
            one[0] == 0.0 && (one[1] / 2e9 - 1.0).abs() < 1e-9,
            "{one:?}"
        );
        assert!(fit_line(&[]).constants.iter().all(|c| c.is_finite()));
    }
}
