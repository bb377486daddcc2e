//! What optimizers have in common.

use crate::{Tensor, Tensors, TrainError};
use half::{bf16, f16};
use moesaic_engine::{HostTensor, Layer};
use moesaic_kernel::DType;
use moesaic_weights::{HostTensor as Stored, HostWeights};

/// What the names of optimizer state begin with, so that it can lie beside the
/// weights: `optimizer.first.experts.up.weight`.
pub const STATE_PREFIX: &str = "optimizer.";

/// A rule that turns gradients into a step of the weights. Results depend on
/// nothing but its arguments: elements are independent of each other, and no
/// sum depends on a number of threads.
pub trait Optimizer {
    /// Moves every parameter that has a gradient of its name; the others stay.
    ///
    /// # Errors
    /// [`TrainError::Tensor`] for a gradient without parameter or of another
    /// shape; nothing has then changed.
    fn step(&mut self, parameters: &mut Tensors, gradients: &Tensors) -> Result<(), TrainError>;

    /// All state, by names that begin with [`STATE_PREFIX`].
    fn state(&self) -> HostWeights;

    /// Takes the state back from tensors that [`Optimizer::state`] gave;
    /// others among them are ignored.
    ///
    /// # Errors
    /// [`TrainError::Tensor`] when a tensor of the state is missing or has
    /// another dtype.
    fn restore(&mut self, state: &HostWeights) -> Result<(), TrainError>;
}

/// Takes an optimizer's step with the gradients that a layer holds, and gives
/// the layer the new weights, rounded to its types. `parameters` are the f32
/// master copies of the layer's weights, by the layer's names.
///
/// # Errors
/// Those of [`Optimizer::step`] and of the layer.
pub fn update(
    layer: &Layer,
    optimizer: &mut impl Optimizer,
    parameters: &mut Tensors,
) -> Result<(), TrainError> {
    let held = layer.gradients()?;
    let gradients = held.into_iter().map(|(name, gradient)| {
        let tensor = Tensor::new(&gradient.shape, gradient.to_f32());
        (name, tensor)
    });
    let gradients: Tensors = gradients.collect();
    optimizer.step(parameters, &gradients)?;
    for name in gradients.keys() {
        let dtype = layer.plan().tensor(name).map_or(DType::F32, |t| t.dtype);
        layer.set_weight(name, &rounded(&parameters[name], dtype))?;
    }
    Ok(())
}

/// The values in a layer's type: to nearest, ties to even.
fn rounded(tensor: &Tensor, dtype: DType) -> HostTensor<'_> {
    let data = tensor.data.iter();
    match dtype {
        DType::F16 => HostTensor::owned(&tensor.shape, data.map(|v| f16::from_f32(*v)).collect()),
        DType::Bf16 => HostTensor::owned(&tensor.shape, data.map(|v| bf16::from_f32(*v)).collect()),
        _ => HostTensor::new(&tensor.shape, &tensor.data),
    }
}

/// Scales all gradients so that their norm together is at most `most`, and
/// returns the norm they had. Summed in f64, by name.
pub fn clip_norm(gradients: &mut Tensors, most: f32) -> f64 {
    let squares = |tensor: &Tensor| {
        let each = tensor.data.iter().map(|g| f64::from(*g) * f64::from(*g));
        each.sum::<f64>()
    };
    let norm = gradients.values().map(squares).sum::<f64>().sqrt();
    if norm > f64::from(most) {
        let factor = (f64::from(most) / norm) as f32;
        for tensor in gradients.values_mut() {
            tensor.data.iter_mut().for_each(|g| *g *= factor);
        }
    }
    norm
}

/// Refuses gradients that do not belong to the parameters.
pub(crate) fn check(parameters: &Tensors, gradients: &Tensors) -> Result<(), TrainError> {
    for (name, gradient) in gradients {
        let parameter = parameters
            .get(name)
            .ok_or_else(|| TrainError::tensor(name, "has a gradient and is no parameter"))?;
        if parameter.shape != gradient.shape {
            let (own, other) = (&parameter.shape, &gradient.shape);
            let problem = format!("has shape {own:?}, its gradient {other:?}");
            return Err(TrainError::tensor(name, problem));
        }
    }
    Ok(())
}

/// The state tensors of one kind, as a checkpoint names them.
pub(crate) fn save(kind: &str, tensors: &Tensors, into: &mut HostWeights) {
    for (name, tensor) in tensors {
        let stored = Stored::from_f32(&tensor.shape, &tensor.data);
        into.insert(format!("{STATE_PREFIX}{kind}.{name}"), stored);
    }
}

/// The state tensors of one kind out of a checkpoint.
pub(crate) fn restored(kind: &str, from: &HostWeights) -> Result<Tensors, TrainError> {
    let prefix = format!("{STATE_PREFIX}{kind}.");
    let mut tensors = Tensors::new();
    for (full, stored) in from {
        let Some(name) = full.strip_prefix(&prefix) else {
            continue;
        };
        if stored.dtype != DType::F32 {
            let problem = format!("is {}, optimizer state is f32", stored.dtype);
            return Err(TrainError::tensor(full, problem));
        }
        let data = stored.to_f64().iter().map(|v| *v as f32).collect();
        tensors.insert(name.to_string(), Tensor::new(&stored.shape, data));
    }
    Ok(tensors)
}

/// State beside a parameter: zeros before its first step, and again when the
/// parameter has got another shape.
pub(crate) fn beside<'a>(state: &'a mut Tensors, name: &str, like: &Tensor) -> &'a mut [f32] {
    let tensor = state
        .entry(name.to_string())
        .or_insert_with(|| Tensor::zeros(&like.shape));
    if tensor.shape != like.shape {
        *tensor = Tensor::zeros(&like.shape);
    }
    &mut tensor.data
}
