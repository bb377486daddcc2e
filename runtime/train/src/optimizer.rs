//! The common part of optimizers.

use crate::TrainError;
use moesaic_engine::{EngineError, Layer};
use moesaic_kernel::DType;
use moesaic_tensor::{Tensor, Tensors};
use std::borrow::Cow;

/// Prefix of the names of optimizer state, so that state can lie beside the weights:
/// `optimizer.first.experts.up.weight`.
pub const STATE_PREFIX: &str = "optimizer.";

/// A rule that turns gradients into a step of the weights. Results depend on its arguments alone:
/// elements are independent of each other, and no sum depends on the number of threads.
pub trait Optimizer {
    /// Updates every parameter that has a gradient of its name; the others stay. Parameters are f32,
    /// and gradients of 16 bits are widened.
    ///
    /// # Errors
    /// [`TrainError::Tensor`] for a gradient without a parameter, or of another shape or type.
    /// Nothing has changed then.
    fn step(
        &mut self,
        parameters: &mut Tensors<'_>,
        gradients: &Tensors<'_>,
    ) -> Result<(), TrainError>;

    /// Returns all state, under names that begin with [`STATE_PREFIX`].
    fn state(&self) -> Tensors<'_>;

    /// Restores the state from tensors that [`Optimizer::state`] returned, and ignores others among
    /// them.
    ///
    /// # Errors
    /// [`TrainError::Tensor`] if a tensor of the state is missing or has another dtype.
    fn restore(&mut self, state: &Tensors<'_>) -> Result<(), TrainError>;
}

/// Returns the floating-point tensors of a checkpoint as f32 master copies. Integer tensors, such
/// as a routing table, are not trained and left out, and so are the scales of codes.
pub fn masters(weights: &Tensors<'_>) -> Tensors<'static> {
    let floats = weights.iter().filter(|(_, tensor)| tensor.dtype.is_float());
    floats
        .filter(|(name, _)| !is_of_codes(name, weights))
        .map(|(name, tensor)| (name.clone(), Tensor::owned(&tensor.shape, tensor.to_f32())))
        .collect()
}

/// Returns whether a tensor holds scales or offsets of a matrix of codes.
fn is_of_codes(name: &str, weights: &Tensors<'_>) -> bool {
    let parts = ["scale", "scale_2", "offset", "offset_2"];
    let Some((matrix, end)) = name.rsplit_once('.') else {
        return false;
    };
    let codes = weights.get(&*format!("{matrix}.weight"));
    parts.contains(&end) && codes.is_some_and(|codes| !codes.dtype.is_float())
}

/// Takes an optimizer's step with the gradients that a layer holds, and gives
/// the layer the new weights, rounded to its types. `parameters` are the f32
/// master copies of the layer's weights, by the layer's names.
///
/// # Errors
/// The errors of [`Optimizer::step`] and of the layer; [`EngineError::OverRanks`] for a layer over
/// ranks, which [`update_mesh`](crate::update_mesh) steps.
pub fn update(
    layer: &Layer,
    optimizer: &mut impl Optimizer,
    parameters: &mut Tensors<'_>,
) -> Result<(), TrainError> {
    if layer.mesh().is_some() {
        let asked = "`update`";
        return Err(EngineError::OverRanks { asked }.into());
    }
    let gradients = layer.gradients()?;
    optimizer.step(parameters, &gradients)?;
    set_named(layer, parameters, gradients.keys())
}

/// Gives a layer its weights from f32 masters, rounded to its types; over ranks, this rank's part.
/// Use it after you have read masters from a checkpoint.
///
/// # Errors
/// [`TrainError::Tensor`] for a master that is not f32, and [`EngineError::Weight`] for one that is
/// no weight of the layer or has another shape. Those before it are set then.
pub fn set_weights(layer: &Layer, masters: &Tensors<'_>) -> Result<(), TrainError> {
    set_named(layer, masters, masters.keys())
}

/// Gives a layer some of its weights.
pub(crate) fn set_named<'n>(
    layer: &Layer,
    masters: &Tensors<'_>,
    names: impl IntoIterator<Item = &'n String>,
) -> Result<(), TrainError> {
    for name in names {
        let dtype = layer.tensor(name).map_or(DType::F32, |t| t.dtype);
        let (values, shape) = (floats(name, &masters[name])?, &masters[name].shape);
        layer.set_weight(name, &Tensor::rounded(dtype, shape, &values))?;
    }
    Ok(())
}

/// Scales all gradients so that their joint norm is at most `most`, and returns the norm before. It
/// is summed in f64, in the order of names.
///
/// # Errors
/// [`TrainError::Tensor`] for a gradient of integers.
pub fn clip_norm(gradients: &mut Tensors<'_>, most: f32) -> Result<f64, TrainError> {
    let mut sum = 0.0;
    for (name, gradient) in &*gradients {
        let values = widened(name, gradient)?;
        let squares = values.iter().map(|g| f64::from(*g) * f64::from(*g));
        sum += squares.sum::<f64>();
    }
    let norm = sum.sqrt();
    if norm > f64::from(most) {
        let factor = (f64::from(most) / norm) as f32;
        for gradient in gradients.values_mut() {
            scale(gradient, factor);
        }
    }
    Ok(norm)
}

/// Multiplies a gradient by a factor: in place if it is f32.
fn scale(gradient: &mut Tensor<'_>, factor: f32) {
    if gradient.dtype == DType::F32 {
        floats_mut(gradient).iter_mut().for_each(|g| *g *= factor);
    } else {
        let values = gradient.to_f32().into_iter().map(|g| g * factor).collect();
        *gradient = rounded(gradient.dtype, &gradient.shape, values);
    }
}

/// Returns the values of a gradient, which may have 16 bits.
pub(crate) fn widened<'t>(
    name: &str,
    gradient: &'t Tensor<'_>,
) -> Result<Cow<'t, [f32]>, TrainError> {
    match gradient.dtype {
        DType::F16 | DType::Bf16 => Ok(gradient.to_f32().into()),
        _ => floats(name, gradient),
    }
}

/// Returns a tensor of these values, each rounded to the dtype.
pub(crate) fn rounded(dtype: DType, shape: &[usize], values: Vec<f32>) -> Tensor<'static> {
    match dtype {
        DType::F32 => Tensor::owned(shape, values),
        _ => Tensor::rounded(dtype, shape, &values).into_static(),
    }
}

/// Returns the elements of a tensor, which must be f32.
pub(crate) fn floats<'t>(name: &str, tensor: &'t Tensor<'_>) -> Result<Cow<'t, [f32]>, TrainError> {
    let checked = tensor.check(DType::F32, &tensor.shape);
    checked.map_err(|differs| TrainError::tensor(name, differs.to_string()))?;
    Ok(tensor.values().unwrap_or_default())
}

/// Returns the elements of a tensor that was checked to be f32.
pub(crate) fn floats_mut<'t>(tensor: &'t mut Tensor<'_>) -> &'t mut [f32] {
    tensor.values_mut().unwrap_or_default()
}

/// Refuses gradients that do not belong to the parameters.
pub(crate) fn check(parameters: &Tensors<'_>, gradients: &Tensors<'_>) -> Result<(), TrainError> {
    for (name, gradient) in gradients {
        let parameter = parameters
            .get(name)
            .ok_or_else(|| TrainError::tensor(name, "has a gradient and is no parameter"))?;
        if parameter.shape != gradient.shape {
            let (own, other) = (&parameter.shape, &gradient.shape);
            let problem = format!("has shape {own:?}, its gradient {other:?}");
            return Err(TrainError::tensor(name, problem));
        }
        floats(name, parameter)?;
        if !gradient.dtype.is_float() {
            floats(name, gradient)?;
        }
    }
    Ok(())
}

/// Adds the state tensors of one kind, as a checkpoint names them.
pub(crate) fn save<'s>(kind: &str, tensors: &'s Tensors<'_>, into: &mut Tensors<'s>) {
    for (name, tensor) in tensors {
        into.insert(format!("{STATE_PREFIX}{kind}.{name}"), tensor.lend());
    }
}

/// Returns the state tensors of one kind from a checkpoint.
pub(crate) fn restored(kind: &str, from: &Tensors<'_>) -> Result<Tensors<'static>, TrainError> {
    let prefix = format!("{STATE_PREFIX}{kind}.");
    let mut tensors = Tensors::new();
    for (full, stored) in from {
        let Some(name) = full.strip_prefix(&prefix) else {
            continue;
        };
        let values = floats(full, stored)?;
        tensors.insert(name, Tensor::copied(&stored.shape, &values));
    }
    Ok(tensors)
}

/// Returns the state beside a parameter: zeros before its first step, and again if the parameter's
/// shape has changed.
pub(crate) fn beside<'a>(
    state: &'a mut Tensors<'static>,
    name: &str,
    like: &Tensor<'_>,
) -> &'a mut [f32] {
    let zeros = || Tensor::zeros(DType::F32, &like.shape);
    let tensor = state.entry(name.to_string()).or_insert_with(zeros);
    if tensor.shape != like.shape {
        *tensor = zeros();
    }
    floats_mut(tensor)
}
