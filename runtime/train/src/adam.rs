//! AdamW.

use crate::optimizer::{STATE_PREFIX, beside, check, floats_mut, restored, save, widened};
use crate::{Optimizer, TrainError};
use moesaic_tensor::{Tensor, Tensors};

/// Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2), with the decay
/// multiplied by the learning rate as in PyTorch:
///
/// `m = β₁ m + (1 − β₁) g`, `v = β₂ v + (1 − β₂) g²`,
/// `w −= rate · (decay · w + m/(1 − β₁ᵗ) / (√(v/(1 − β₂ᵗ)) + ε))`.
#[derive(Clone, Debug)]
pub struct AdamW {
    /// The learning rate.
    pub learning_rate: f32,
    /// β₁ and β₂.
    pub betas: [f32; 2],
    /// ε, added outside the root.
    pub epsilon: f32,
    /// The factor on each weight's decay: a step shrinks a weight by `learning_rate · weight_decay`
    /// of itself.
    pub weight_decay: f32,
    /// Returns true for parameters that decay, by name.
    pub decays: fn(&str) -> bool,
    /// The number of steps taken.
    pub steps: u32,
    /// m, by parameter name.
    pub first: Tensors<'static>,
    /// v, by parameter name.
    pub second: Tensors<'static>,
}

impl Default for AdamW {
    fn default() -> AdamW {
        AdamW::new(1e-3)
    }
}

impl AdamW {
    /// Returns β = 0.9 and 0.999, ε = 1e-8, and weight decay 0.01 on all parameters.
    pub fn new(learning_rate: f32) -> AdamW {
        AdamW {
            learning_rate,
            betas: [0.9, 0.999],
            epsilon: 1e-8,
            weight_decay: 0.01,
            decays: |_| true,
            steps: 0,
            first: Tensors::new(),
            second: Tensors::new(),
        }
    }

    fn step_of(&self) -> String {
        format!("{STATE_PREFIX}step")
    }
}

impl Optimizer for AdamW {
    fn step(
        &mut self,
        parameters: &mut Tensors<'_>,
        gradients: &Tensors<'_>,
    ) -> Result<(), TrainError> {
        check(parameters, gradients)?;
        self.steps += 1;
        let [first, second] = self.betas;
        let corrected = |beta: f32| 1.0 - power(f64::from(beta), self.steps);
        let rate = (f64::from(self.learning_rate) / corrected(first)) as f32;
        let root = corrected(second).sqrt() as f32;
        for (name, gradient) in gradients {
            let Some(parameter) = parameters.get_mut(name) else {
                continue;
            };
            let decay = if (self.decays)(name) {
                self.weight_decay
            } else {
                0.0
            };
            let kept = 1.0 - self.learning_rate * decay;
            let means = beside(&mut self.first, name, gradient);
            let squares = beside(&mut self.second, name, gradient);
            let state = means.iter_mut().zip(squares);
            let (values, steps) = (floats_mut(parameter), widened(name, gradient)?);
            let pairs = steps.iter().zip(state);
            for (w, (g, (m, v))) in values.iter_mut().zip(pairs) {
                *m = first * *m + (1.0 - first) * g;
                *v = second * *v + (1.0 - second) * g * g;
                *w = *w * kept - rate * (*m / (v.sqrt() / root + self.epsilon));
            }
        }
        Ok(())
    }

    fn state(&self) -> Tensors<'_> {
        let mut state = Tensors::new();
        state.insert(
            self.step_of(),
            Tensor::owned(&[1], vec![i64::from(self.steps)]),
        );
        save("first", &self.first, &mut state);
        save("second", &self.second, &mut state);
        state
    }

    fn restore(&mut self, state: &Tensors<'_>) -> Result<(), TrainError> {
        let name = self.step_of();
        let step = state
            .get(&name)
            .ok_or_else(|| TrainError::tensor(&name, "is missing"))?;
        let read = match step.values::<i64>().as_deref() {
            Some([count]) => u32::try_from(*count).ok(),
            _ => None,
        };
        let Some(read) = read else {
            return Err(TrainError::tensor(&name, "is not one i64 from 0"));
        };
        let (first, second) = (restored("first", state)?, restored("second", state)?);
        (self.steps, self.first, self.second) = (read, first, second);
        Ok(())
    }
}

/// Computes a power by repeated squares, the same on every machine, and in f64, because in f32 it
/// is far off at step 10⁵.
fn power(mut square: f64, mut exponent: u32) -> f64 {
    let mut product = 1.0;
    while exponent > 0 {
        if exponent % 2 == 1 {
            product *= square;
        }
        square *= square;
        exponent /= 2;
    }
    product
}
