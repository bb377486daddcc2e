//! What commands that time layers have in common.

use crate::failure::Result;
use crate::random;
use moesaic::{Input, Layer, RngKey, Tensor};
use std::time::Duration;

/// A call that a layer is timed on.
pub struct Call {
    pub input: Input<'static>,
    /// Where the layer trains.
    dy: Option<Tensor<'static>>,
}

impl Call {
    pub fn new(layer: &Layer, input: Input<'static>) -> Call {
        let trains = layer.plan().training.is_some();
        let dy = || random::output_gradient(layer.spec(), input.tokens);
        Call {
            dy: trains.then(dy),
            input,
        }
    }

    /// Runs the layer from host memory to host memory, forward and backward
    /// where it trains. [`Layer::time_steps`] then runs the same launches.
    ///
    /// # Errors
    /// When a launch fails.
    pub fn run(&self, layer: &Layer) -> Result {
        match &self.dy {
            None => drop(layer.forward(&self.input)?),
            Some(dy) => {
                let rng_key = RngKey::default();
                let (_, saved) = layer.forward_train(&self.input, &["y"], rng_key)?;
                layer.backward(&saved, dy, false)?;
                // Its memory, x in it, is what a timed pass keeps things in.
            }
        }
        Ok(())
    }
}

/// What a layer gives for tokens in the pass that is timed.
///
/// # Errors
/// When a launch fails.
pub fn y(layer: &Layer, input: &Input<'_>) -> Result<Tensor<'static>> {
    let output = match layer.plan().training {
        None => layer.forward(input)?,
        Some(_) => layer.forward_train(input, &["y"], RngKey::default())?.0,
    };
    Ok(output.y().clone())
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
