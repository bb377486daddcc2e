//! Helpers of the commands that time layers.

use crate::failure::Result;
use crate::random;
use moesaic::{Input, Layer, RngKey, Tensor};
use std::time::Duration;

/// A call that a layer is timed on.
pub struct TimedCall {
    pub input: Input<'static>,
    /// The gradient of the output, for a layer that trains.
    dy: Option<Tensor<'static>>,
}

impl TimedCall {
    pub fn new(layer: &Layer, input: Input<'static>) -> TimedCall {
        let trains = layer.plan().training.is_some();
        let dy = || random::output_gradient(layer.spec(), input.tokens);
        TimedCall {
            dy: trains.then(dy),
            input,
        }
    }

    /// Runs the layer from host memory to host memory: forward and, if the layer trains, backward.
    /// [`Layer::time_steps`] then repeats the same launches.
    ///
    /// # Errors
    /// Fails if a launch fails.
    pub fn run(&self, layer: &Layer) -> Result {
        match &self.dy {
            None => drop(layer.forward(&self.input)?),
            Some(dy) => {
                let rng_key = RngKey::default();
                let (_, saved) = layer.forward_train(self.input.reading(&["y"]), rng_key)?;
                layer.backward(&saved, dy, false)?;
                // The timed passes reuse the memory of this pass, x included.
            }
        }
        Ok(())
    }
}

/// Returns the layer's output in the pass that is timed.
///
/// # Errors
/// Fails if a launch fails.
pub fn y(layer: &Layer, input: &Input<'_>) -> Result<Tensor<'static>> {
    let output = match layer.plan().training {
        None => layer.forward(input)?,
        Some(_) => {
            layer
                .forward_train(input.reading(&["y"]), RngKey::default())?
                .0
        }
    };
    Ok(output.y().clone())
}

/// Returns the median, which is the later of two middle times; zero for an empty list.
pub fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// Returns the spread of times: the range of the middle half of them over their median; 0 for an
/// empty list.
pub fn spread(times: &[Duration]) -> f64 {
    let mut times: Vec<f64> = times.iter().map(Duration::as_secs_f64).collect();
    times.sort_unstable_by(f64::total_cmp);
    let at = |quarter: usize| times.get(times.len() * quarter / 4).copied();
    match (at(1), at(2), at(3)) {
        (Some(low), Some(middle), Some(high)) if middle > 0.0 => (high - low) / middle,
        _ => 0.0,
    }
}

/// Returns the median, which is the mean of two middle ratios; 1 for an empty list.
pub fn middle(mut ratios: Vec<f64>) -> f64 {
    ratios.sort_unstable_by(f64::total_cmp);
    let half = ratios.len() / 2;
    match ratios.len() {
        0 => 1.0,
        n if n % 2 == 1 => ratios[half],
        _ => (ratios[half - 1] + ratios[half]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_spread() {
        let times = [10, 8, 9, 12, 11, 40, 7, 10].map(Duration::from_millis);
        assert!((spread(&times) - 0.3).abs() < 1e-9, "{}", spread(&times));
        assert_eq!(spread(&[]), 0.0);
    }

    #[test]
    fn ratios_have_a_middle() {
        assert_eq!(middle(vec![]), 1.0);
        assert_eq!(middle(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(middle(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
