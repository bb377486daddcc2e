//! What commands that time layers have in common.

use crate::failure::Result;
use crate::random;
use moesaic::{Counters, Input, Layer};
use std::time::Duration;

/// Runs a layer on `input`, so that [`Layer::time_steps`] runs its launches on
/// the same: backward too where the layer is trained.
///
/// # Errors
/// When a launch fails.
pub fn stage(layer: &Layer, input: &Input<'_>) -> Result {
    layer.forward(input)?;
    if layer.plan().training.is_some() {
        let (_, saved) = layer.forward_train(input, &[], Counters::default())?;
        let dy = random::output_gradient(layer.spec(), input.tokens);
        layer.backward(&saved, &dy, false)?;
        // Its memory, x in it, is what the timed pass keeps things in.
    }
    Ok(())
}

/// The middle one, the later of two; zero of none.
pub fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// The middle one; of an even number the mean of two. 1 of none.
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
    fn ratios_have_a_middle() {
        assert_eq!(middle(vec![]), 1.0);
        assert_eq!(middle(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(middle(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
