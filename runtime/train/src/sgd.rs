//! Stochastic gradient descent.

use crate::optimizer::{beside, check, floats_mut, restored, save, widened};
use crate::{Optimizer, TrainError};
use moesaic_tensor::Tensors;

/// SGD: `w −= rate · (decay · w + g)`. With momentum μ, `m = μ m + g` replaces g; with `nesterov`,
/// `g + μ m` does. Weight decay stays out of the momentum.
#[derive(Clone, Debug)]
pub struct Sgd {
    /// The learning rate.
    pub learning_rate: f32,
    /// μ; 0 keeps no state.
    pub momentum: f32,
    /// Look ahead by one step of the momentum.
    pub nesterov: bool,
    /// The factor on each weight's decay: a step shrinks a weight by `learning_rate · weight_decay`
    /// of itself.
    pub weight_decay: f32,
    /// m, by parameter name.
    pub moments: Tensors<'static>,
}

impl Default for Sgd {
    fn default() -> Sgd {
        Sgd::new(1e-2)
    }
}

impl Sgd {
    /// Returns plain gradient descent.
    pub fn new(learning_rate: f32) -> Sgd {
        Sgd {
            learning_rate,
            momentum: 0.0,
            nesterov: false,
            weight_decay: 0.0,
            moments: Tensors::new(),
        }
    }

    /// Returns gradient descent with momentum.
    pub fn with_momentum(learning_rate: f32, momentum: f32) -> Sgd {
        Sgd {
            momentum,
            ..Sgd::new(learning_rate)
        }
    }
}

impl Optimizer for Sgd {
    fn step(
        &mut self,
        parameters: &mut Tensors<'_>,
        gradients: &Tensors<'_>,
    ) -> Result<(), TrainError> {
        check(parameters, gradients)?;
        let (rate, momentum) = (self.learning_rate, self.momentum);
        let kept = 1.0 - rate * self.weight_decay;
        for (name, gradient) in gradients {
            let Some(parameter) = parameters.get_mut(name) else {
                continue;
            };
            let (values, steps) = (floats_mut(parameter), widened(name, gradient)?);
            if momentum == 0.0 {
                for (w, g) in values.iter_mut().zip(&*steps) {
                    *w = *w * kept - rate * g;
                }
                continue;
            }
            let moments = beside(&mut self.moments, name, gradient);
            let pairs = steps.iter().zip(moments);
            for (w, (g, m)) in values.iter_mut().zip(pairs) {
                *m = momentum * *m + g;
                let ahead = if self.nesterov { g + momentum * *m } else { *m };
                *w = *w * kept - rate * ahead;
            }
        }
        Ok(())
    }

    fn state(&self) -> Tensors<'_> {
        let mut state = Tensors::new();
        save("momentum", &self.moments, &mut state);
        state
    }

    fn restore(&mut self, state: &Tensors<'_>) -> Result<(), TrainError> {
        self.moments = restored("momentum", state)?;
        Ok(())
    }
}
