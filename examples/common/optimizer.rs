//! A step of moesaic's optimizer on every parameter of a module.

use super::ops::Module;
use moesaic::train::{AdamW, Optimizer, Tensor, Tensors, TrainError, clip_norm};
use std::mem::take;

/// AdamW with the β₂ of language models, and decay on matrices only.
pub fn adamw(weight_decay: f32) -> AdamW {
    AdamW {
        betas: [0.9, 0.95],
        weight_decay,
        decays: |name| name.ends_with(".weight"),
        ..AdamW::new(0.0)
    }
}

/// One step at a learning rate, gradients clipped to a joint norm of 1. The
/// values move into the optimizer's tensors and back: nothing is copied.
///
/// # Errors
/// Those of the optimizer.
pub fn step(optimizer: &mut AdamW, module: &mut impl Module, rate: f32) -> Result<(), TrainError> {
    let tensor = |values: &mut Vec<f32>| Tensor::new(&[values.len()], take(values));
    let (mut values, mut gradients) = (Tensors::new(), Tensors::new());
    module.params("", &mut |name, param| {
        values.insert(name.clone(), tensor(&mut param.value));
        gradients.insert(name, tensor(&mut param.grad));
    });
    clip_norm(&mut gradients, 1.0);
    optimizer.learning_rate = rate;
    let result = optimizer.step(&mut values, &gradients);
    module.params("", &mut |name, param| {
        let back = |tensors: &mut Tensors| tensors.remove(&name).map(|t| t.data);
        param.value = back(&mut values).unwrap_or_default();
        param.grad = back(&mut gradients).unwrap_or_default();
    });
    result
}
