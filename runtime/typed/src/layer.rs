//! The connection between a generated layer and the engine's layer, where tensors have names
//! instead of types.

use crate::Array;
use moesaic_engine::{EngineError, Input, Layer, Output, RawBackward, RawCall, RngKey, Saved};
use moesaic_spec::LayerSpec;
use moesaic_target::Ptr;
use moesaic_tensor::{Tensor, Tensors};
use std::borrow::Cow;

/// A generated layer.
pub trait TypedLayer {
    /// The addresses of the inputs and of `y`.
    type Raw: RawArgs;

    /// The addresses of a training call: inputs, `y` and losses.
    type RawTraining: RawArgs;

    /// The addresses of `dy` and `dx`, and optionally of other input gradients.
    type RawBackward: RawGradients;

    /// Returns the untyped layer, with all of its calls.
    fn layer(&self) -> &Layer;

    /// Evaluates the layer on device memory that you own, in stream order and without waiting. On a
    /// mesh all ranks call it, each for its own tokens, and wait only for their exchanges.
    ///
    /// # Safety
    /// Every address must point to memory on the layer's device of the field's element type and
    /// shape. It must stay valid until the stream has passed the call, even if the call fails. Ids
    /// of experts or tokens in inputs must be in range.
    ///
    /// # Errors
    /// If an address is null or misaligned for the kernels, memory runs out, a launch is refused,
    /// or ranks cannot be reached.
    unsafe fn forward_raw(&self, args: &Self::Raw) -> Result<(), EngineError> {
        let tensors = args.tensors();
        // SAFETY: the tensors are named after the same plan; the caller vouches for the memory
        // behind them.
        let call = unsafe { RawCall::new(args.tokens(), tensors.as_ref()) };
        self.layer().forward(call)?;
        Ok(())
    }

    /// Runs the layer forward in training, as [`TypedLayer::forward_raw`] does, and keeps the state
    /// for backward. Random numbers depend on `rng_key` alone.
    ///
    /// # Safety
    /// As [`TypedLayer::forward_raw`]. All memory must stay valid and unchanged until the stream
    /// has passed the last backward call with the result.
    ///
    /// # Errors
    /// As [`TypedLayer::forward_raw`], or if the layer was not made by `training`.
    unsafe fn forward_train_raw(
        &self,
        args: &Self::RawTraining,
        rng_key: RngKey,
    ) -> Result<Saved, EngineError> {
        let tensors = args.tensors();
        // SAFETY: as above.
        let call = unsafe { RawCall::new(args.tokens(), tensors.as_ref()) };
        let (_, saved) = self.layer().forward_train(call, rng_key)?;
        Ok(saved)
    }

    /// Runs the layer backward on device memory that you own, with one row per token of the forward
    /// pass. Gradients of weights stay with the layer: this pass overwrites them, or adds to them
    /// if `accumulate` is set.
    ///
    /// # Safety
    /// As [`TypedLayer::forward_raw`].
    ///
    /// # Errors
    /// As [`TypedLayer::forward_raw`], or if `saved` belongs to another layer.
    unsafe fn backward_raw(
        &self,
        saved: &Saved,
        args: &Self::RawBackward,
        accumulate: bool,
    ) -> Result<(), EngineError> {
        let tensors = args.tensors();
        // SAFETY: as above.
        let dy = unsafe { RawBackward::new(&tensors) };
        self.layer().backward(saved, dy, accumulate)?;
        Ok(())
    }
}

/// The addresses of a call on device memory. Generated code implements it.
pub trait RawArgs {
    /// The list type.
    type Tensors: AsRef<[(&'static str, Ptr)]>;

    /// Returns the number of tokens in the call.
    fn tokens(&self) -> usize;

    /// Returns each tensor's name and address.
    fn tensors(&self) -> Self::Tensors;
}

/// The addresses of a backward pass on device memory. Generated code implements it.
pub trait RawGradients {
    /// Returns the name and address of each tensor that has one.
    fn tensors(&self) -> Vec<(&'static str, Ptr)>;
}

/// Returns the spec that generated code carries as canonical TOML.
///
/// # Panics
/// If the text is not a spec. The version that `check_format` admits wrote it from a spec, so only
/// an edit of the generated code can cause that.
pub fn spec(toml: &str) -> LayerSpec {
    LayerSpec::from_toml(toml).expect("generated from a valid spec")
}

/// Returns one tensor with its shape as data.
pub fn host_tensor<A: Array>(array: &A) -> Tensor<'_> {
    Tensor::new(&A::shape(), A::flatten(std::slice::from_ref(array)))
}

/// Returns one row per token, with the shape as data.
pub fn host_rows<A: Array>(rows: &[A]) -> Tensor<'_> {
    Tensor::new(&[vec![rows.len()], A::shape()].concat(), A::flatten(rows))
}

/// Returns the input of a call.
pub fn input<'a, const N: usize>(tokens: usize, tensors: [(&str, Tensor<'a>); N]) -> Input<'a> {
    Input {
        tokens,
        tensors: tensors.into(),
        ..Input::default()
    }
}

/// Returns the weights of a layer.
pub fn weights<'a, const N: usize>(tensors: [(&str, Tensor<'a>); N]) -> Tensors<'a> {
    tensors.into()
}

/// Reads an output with one row per token of the call.
///
/// # Errors
/// If the layer has no such output, or it has another shape.
pub fn read_rows<A: Array>(output: &Output, name: &str) -> Result<Vec<A>, EngineError> {
    let elements = elements::<A>(output, name)?;
    A::cast(&elements)
        .map(<[A]>::to_vec)
        .ok_or_else(|| no_output(output, name))
}

/// Reads an output whose shape does not depend on the token count.
///
/// # Errors
/// The same as [`read_rows`].
pub fn read<A: Array>(output: &Output, name: &str) -> Result<A, EngineError> {
    match A::cast(&elements::<A>(output, name)?) {
        Some([array]) => Ok(*array),
        _ => Err(no_output(output, name)),
    }
}

fn elements<'o, A: Array>(
    output: &'o Output,
    name: &str,
) -> Result<Cow<'o, [A::Element]>, EngineError> {
    let tensor = output.get(name).ok_or_else(|| no_output(output, name))?;
    tensor.values().ok_or_else(|| no_output(output, name))
}

fn no_output(output: &Output, name: &str) -> EngineError {
    let described = |(name, tensor): (&String, &Tensor<'_>)| {
        format!("{name} ({} of shape {:?})", tensor.dtype, tensor.shape)
    };
    let known: Vec<String> = output
        .clone()
        .into_tensors()
        .iter()
        .map(described)
        .collect();
    EngineError::NoOutput {
        name: name.to_string(),
        known: known.join(", "),
    }
}
