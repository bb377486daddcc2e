//! Between a generated layer and the engine's layer, where tensors have names
//! instead of types.

use crate::Array;
use moesaic_engine::{AnyLayer, AnySaved, EngineError, RngKey};
use moesaic_engine::{Input, Output, RawBackward, RawCall};
use moesaic_spec::LayerSpec;
use moesaic_target::Ptr;
use moesaic_tensor::{Tensor, Tensors};
use std::borrow::Cow;

/// A generated layer.
pub trait TypedLayer {
    /// Addresses of the inputs and of `y`.
    type Raw: RawArgs;

    /// Addresses of the inputs of a call that trains, of `y` and of losses.
    type RawTraining: RawArgs;

    /// Addresses of `dy` and `dx`, and of other gradients of inputs if they are wanted.
    type RawBackward: RawGradients;

    /// The layer without types. [`AnyLayer::one`] is that of one process with its memory
    /// and step times, [`AnyLayer::over_ranks`] a rank's part of one made with a mesh.
    fn layer(&self) -> &AnyLayer;

    /// Evaluates the layer on device memory that the caller owns, in stream order and
    /// without waiting; on a mesh all ranks call it, each for its own tokens, and wait for
    /// what they exchange alone.
    ///
    /// # Safety
    /// Every address must point to memory on the layer's device of the
    /// field's element type and shape, valid until the stream has passed the
    /// call, also one that fails; ids of experts or tokens in inputs must be in range.
    ///
    /// # Errors
    /// When an address is none or kernels cannot use it, memory runs out, a launch is
    /// refused, or ranks cannot be reached.
    unsafe fn forward_raw(&self, args: &Self::Raw) -> Result<(), EngineError> {
        let tensors = args.tensors();
        // SAFETY: the tensors are named after the same plan; the caller
        // vouches for the memory behind them.
        unsafe { self.layer().forward_raw(&call(args, tensors.as_ref())) }
    }

    /// As [`TypedLayer::forward_raw`], as in training: keeps what backward needs.
    /// `rng_key` is the key of all random numbers.
    ///
    /// # Safety
    /// As [`TypedLayer::forward_raw`]; all of it must stay valid and unchanged until the
    /// stream has passed the last backward of the result.
    ///
    /// # Errors
    /// As [`TypedLayer::forward_raw`]; also when the layer was not made by `training`.
    unsafe fn forward_train_raw(
        &self,
        args: &Self::RawTraining,
        rng_key: RngKey,
    ) -> Result<AnySaved, EngineError> {
        let tensors = args.tensors();
        let call = call(args, tensors.as_ref());
        // SAFETY: as above.
        unsafe { self.layer().forward_train_raw(&call, rng_key) }
    }

    /// Runs the layer backward on device memory that the caller owns, with as many rows as
    /// the forward pass had tokens. Gradients of weights stay with the layer: they are
    /// overwritten, or with `accumulate` added to.
    ///
    /// # Safety
    /// As [`TypedLayer::forward_raw`].
    ///
    /// # Errors
    /// As [`TypedLayer::forward_raw`]; also when `saved` is of another layer.
    unsafe fn backward_raw(
        &self,
        saved: &AnySaved,
        args: &Self::RawBackward,
        accumulate: bool,
    ) -> Result<(), EngineError> {
        let tensors = args.tensors();
        let call = RawBackward {
            tensors: &tensors,
            accumulate,
        };
        // SAFETY: as above.
        unsafe { self.layer().backward_raw(saved, &call) }
    }
}

fn call<'a>(args: &impl RawArgs, tensors: &'a [(&'static str, Ptr)]) -> RawCall<'a> {
    RawCall {
        tokens: args.tokens(),
        tensors,
        ..RawCall::default()
    }
}

/// The addresses of a call on device memory. Generated.
pub trait RawArgs {
    /// The list below.
    type Tensors: AsRef<[(&'static str, Ptr)]>;

    /// Tokens of the call.
    fn tokens(&self) -> usize;

    /// Each tensor's name and address.
    fn tensors(&self) -> Self::Tensors;
}

/// The addresses of a backward pass on device memory. Generated.
pub trait RawGradients {
    /// The name and address of each tensor that has one.
    fn tensors(&self) -> Vec<(&'static str, Ptr)>;
}

/// The spec that generated code carries as canonical TOML.
///
/// # Panics
/// When the text is not a spec. It was written from one by the version that
/// `check_format` admits, so only editing the generated code can do that.
pub fn spec(toml: &str) -> LayerSpec {
    LayerSpec::from_toml(toml).expect("generated from a valid spec")
}

/// One tensor with its shape as data.
pub fn host_tensor<A: Array>(array: &A) -> Tensor<'_> {
    Tensor::new(&A::shape(), A::flatten(std::slice::from_ref(array)))
}

/// One row per token, with its shape as data.
pub fn host_rows<A: Array>(rows: &[A]) -> Tensor<'_> {
    Tensor::new(&[vec![rows.len()], A::shape()].concat(), A::flatten(rows))
}

/// The input of a call.
pub fn input<'a, const N: usize>(tokens: usize, tensors: [(&str, Tensor<'a>); N]) -> Input<'a> {
    Input {
        tokens,
        tensors: tensors.into(),
        ..Input::default()
    }
}

/// The weights of a layer.
pub fn weights<'a, const N: usize>(tensors: [(&str, Tensor<'a>); N]) -> Tensors<'a> {
    tensors.into()
}

/// An output with as many rows as the call had tokens.
///
/// # Errors
/// When the layer has no such output, or another shape of it.
pub fn read_rows<A: Array>(output: &Output, name: &str) -> Result<Vec<A>, EngineError> {
    let elements = elements::<A>(output, name)?;
    A::cast(&elements)
        .map(<[A]>::to_vec)
        .ok_or_else(|| no_output(output, name))
}

/// An output whose shape does not depend on the token count.
///
/// # Errors
/// As [`read_rows`].
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
