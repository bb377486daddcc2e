//! Steps of moesaic's optimizer on every parameter of a module.

use super::ops::Module;
use moesaic::train::{AdamW, Optimizer, TrainError, clip_norm};
use moesaic::{Tensor, Tensors};

/// Returns AdamW with the β₂ of language models, and decay on matrices only.
pub fn adamw(weight_decay: f32) -> AdamW {
    AdamW {
        betas: [0.9, 0.95],
        weight_decay,
        decays: |name| name.ends_with(".weight"),
        ..AdamW::new(0.0)
    }
}

/// Takes one step at a learning rate, with gradients clipped to a joint norm of 1.
///
/// # Errors
/// The errors of the optimizer.
pub fn step(optimizer: &mut AdamW, module: &mut impl Module, rate: f32) -> Result<(), TrainError> {
    let tensor = |values: &[f32]| Tensor::copied(&[values.len()], values);
    let (mut values, mut gradients) = (Tensors::new(), Tensors::new());
    module.params("", &mut |name, param| {
        values.insert(name.clone(), tensor(&param.value));
        gradients.insert(name, tensor(&param.grad));
    });
    clip_norm(&mut gradients, 1.0)?;
    optimizer.learning_rate = rate;
    optimizer.step(&mut values, &gradients)?;
    module.params("", &mut |name, param| {
        param.value.copy_from_slice(&values[&name].to_f32());
    });
    Ok(())
}
