//! Inputs and outputs of calls.

use crate::error::EngineError;
use crate::reason::InputReason;
use moesaic_kernel::DType;
use moesaic_plan::{LayerPlan, TensorPlan};
use moesaic_target::Ptr;
use moesaic_tensor::{Element, Tensor, Tensors};
use std::borrow::Cow;
use std::ops::Index;
use std::time::Duration;

/// The input of a call, in host memory.
#[derive(Clone, Debug, Default)]
pub struct Input<'a> {
    /// Tokens of this call.
    pub tokens: usize,
    /// The tensors: `x [T, d]`; `token_ids [T]` i32 for a table router;
    /// `topk_ids [T, K]` i32 and `topk_weights [T, K]` f32 for an external one.
    /// [`Layer::tensors`](crate::Layer::tensors) lists those of a layer.
    pub tensors: Tensors<'a>,
    /// The capacity factor of this call instead of the spec's, by the same
    /// formula; for modes `factor` and `bounded`.
    pub capacity_factor: Option<f64>,
}

impl<'a> Input<'a> {
    /// Makes the input of a call from `tokens` rows: `x` holds `tokens * model_dim` elements.
    pub fn new<E: Element>(tokens: usize, x: &'a [E]) -> Input<'a> {
        // Without tokens the width cannot be known; the check of inputs accepts any then.
        let width = x.len().checked_div(tokens).unwrap_or(0);
        let mut input = Input {
            tokens,
            ..Input::default()
        };
        input.insert("x", Tensor::new(&[tokens, width], x));
        input
    }

    /// This input with the ids that a table router looks up.
    pub fn with_token_ids(mut self, token_ids: &'a [i32]) -> Input<'a> {
        self.insert("token_ids", Tensor::new(&[token_ids.len()], token_ids));
        self
    }

    /// This input with the decision that an external router made.
    pub fn with_routing(mut self, top_k: usize, ids: &'a [i32], weights: &'a [f32]) -> Input<'a> {
        self.insert("topk_ids", Tensor::new(&[self.tokens, top_k], ids));
        self.insert("topk_weights", Tensor::new(&[self.tokens, top_k], weights));
        self
    }

    /// This input with a capacity factor of its own.
    pub fn with_capacity_factor(mut self, factor: f64) -> Input<'a> {
        self.capacity_factor = Some(factor);
        self
    }

    /// Returns the arguments of a call with this input that reads these outputs back. They borrow
    /// the input, so give an input that you do not pass on at once a name:
    /// `let input = Input::new(5, &x); layer.forward(input.reading(&["y", "counts"]))`.
    pub fn reading<'c>(&'c self, outputs: &'c [&'c str]) -> CallInput<'c> {
        CallInput::from(self).reading(outputs)
    }

    /// Adds or replaces a tensor.
    pub fn insert(&mut self, name: &str, tensor: Tensor<'a>) {
        self.tensors.insert(name.to_string(), tensor);
    }
}

/// The arguments of a call: its tensors, in host memory or on the device, and the outputs to read
/// back.
///
/// Slices of `x` such as `&[f32]` and `&Vec<f32>`, `&Input` and [`RawCall`] convert into it. A slice
/// is enough for a layer that reads no other input. Unless you name others by
/// [`CallInput::reading`], `y` is read back.
#[derive(Clone, Copy, Debug)]
pub struct CallInput<'a> {
    pub(crate) given: Given<'a>,
    pub(crate) outputs: &'a [&'a str],
    pub(crate) rng_key: Option<RngKey>,
}

/// The forms of a [`CallInput`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Given<'a> {
    /// The rows of `x`, as many as fill the slice.
    Rows {
        dtype: DType,
        bytes: &'a [u8],
    },
    Input(&'a Input<'a>),
    Raw(RawCall<'a>),
}

impl<'a> CallInput<'a> {
    fn new(given: Given<'a>) -> CallInput<'a> {
        CallInput {
            given,
            outputs: &["y"],
            rng_key: None,
        }
    }

    /// Makes the call read these outputs back, by name. A [`RawCall`] reads nothing back: its
    /// results go to the addresses that it names.
    #[must_use]
    pub fn reading(self, outputs: &'a [&'a str]) -> CallInput<'a> {
        CallInput { outputs, ..self }
    }

    /// Makes it a call as in training: [`Layer::route`](crate::Layer::route) then routes as
    /// [`Layer::forward_train`](crate::Layer::forward_train) does with the same key.
    #[must_use]
    pub fn in_training(self, rng_key: RngKey) -> CallInput<'a> {
        CallInput {
            rng_key: Some(rng_key),
            ..self
        }
    }

    /// Returns the arguments in one of two forms, for a layer of this plan.
    pub(crate) fn args(self, plan: &LayerPlan) -> Result<CallArgs<'a>, EngineError> {
        let input = match self.given {
            Given::Raw(call) => return Ok(CallArgs::Raw(call)),
            Given::Input(input) => Cow::Borrowed(input),
            Given::Rows { dtype, bytes } => {
                let x = plan.tensor("x").expect("every layer has x");
                let tokens = tokens_of(x, dtype, bytes)?;
                let mut input = Input {
                    tokens,
                    ..Input::default()
                };
                // Borrowed, as the caller's slice outlives the call: rows of a prefill are large, and
                // the upload is their only copy.
                let tensor = Tensor {
                    dtype,
                    shape: shape_for(x, tokens),
                    data: bytes.into(),
                };
                input.insert("x", tensor);
                Cow::Owned(input)
            }
        };
        Ok(CallArgs::Host(input, self.outputs))
    }
}

impl<'a, E: Element> From<&'a [E]> for CallInput<'a> {
    fn from(rows: &'a [E]) -> CallInput<'a> {
        CallInput::new(Given::Rows {
            dtype: E::DTYPE,
            bytes: bytemuck::cast_slice(rows),
        })
    }
}

impl<'a, E: Element, const N: usize> From<&'a [E; N]> for CallInput<'a> {
    fn from(rows: &'a [E; N]) -> CallInput<'a> {
        rows.as_slice().into()
    }
}

impl<'a, E: Element> From<&'a Vec<E>> for CallInput<'a> {
    fn from(rows: &'a Vec<E>) -> CallInput<'a> {
        rows.as_slice().into()
    }
}

impl<'a> From<&'a Input<'_>> for CallInput<'a> {
    fn from(input: &'a Input<'_>) -> CallInput<'a> {
        CallInput::new(Given::Input(input))
    }
}

impl<'a> From<&CallInput<'a>> for CallInput<'a> {
    fn from(call: &CallInput<'a>) -> CallInput<'a> {
        *call
    }
}

impl<'a> From<RawCall<'a>> for CallInput<'a> {
    fn from(call: RawCall<'a>) -> CallInput<'a> {
        CallInput::new(Given::Raw(call))
    }
}

/// The arguments of a forward call, and where its results go.
pub(crate) enum CallArgs<'c> {
    /// Inputs in host memory, and the names of the outputs to read back.
    Host(Cow<'c, Input<'c>>, &'c [&'c str]),
    /// Device memory, for which the caller answers.
    Raw(RawCall<'c>),
}

impl<'c> CallArgs<'c> {
    /// Returns the input and the names of outputs, for a layer whose calls pass through the host.
    pub fn in_host_memory(self) -> Result<(Cow<'c, Input<'c>>, &'c [&'c str]), EngineError> {
        match self {
            CallArgs::Host(input, names) => Ok((input, names)),
            CallArgs::Raw(_) => Err(EngineError::input("x", InputReason::OnDevice)),
        }
    }

    pub fn tokens(&self) -> usize {
        match self {
            CallArgs::Host(input, _) => input.tokens,
            CallArgs::Raw(call) => call.tokens,
        }
    }

    pub fn capacity_factor(&self) -> Option<f64> {
        match self {
            CallArgs::Host(input, _) => input.capacity_factor,
            CallArgs::Raw(call) => call.capacity_factor,
        }
    }
}

/// Returns the number of rows of `x` in these bytes.
pub(crate) fn tokens_of(x: &TensorPlan, dtype: DType, bytes: &[u8]) -> Result<usize, EngineError> {
    let elements = bytes.len() / dtype.size();
    let width = x.bytes(1) as usize / x.dtype.size();
    if dtype == x.dtype && elements.is_multiple_of(width) {
        return Ok(elements / width);
    }
    let reason = InputReason::Rows {
        elements,
        found: dtype,
        width,
        wanted: x.dtype,
    };
    Err(EngineError::input("x", reason))
}

/// The outputs of a call, in host memory.
#[derive(Clone, Debug, Default)]
pub struct Output {
    pub(crate) tensors: Tensors<'static>,
}

impl Output {
    /// Returns the tensor of this name, if the call asked for it.
    pub fn get(&self, name: &str) -> Option<&Tensor<'static>> {
        self.tensors.get(name)
    }

    /// Returns `y [T, output_dim]`, in the layer's activation dtype.
    pub fn y(&self) -> &Tensor<'static> {
        &self.tensors["y"]
    }

    /// Returns every tensor that the call asked for, by name.
    pub fn into_tensors(self) -> Tensors<'static> {
        self.tensors
    }
}

/// `output["topk_ids"]`, the tensor of that name.
///
/// # Panics
/// If the call did not ask for it; [`Output::get`] returns `None` then.
impl Index<&str> for Output {
    type Output = Tensor<'static>;

    fn index(&self, name: &str) -> &Tensor<'static> {
        self.get(name).unwrap_or_else(|| {
            let read: Vec<&str> = self.tensors.keys().map(String::as_str).collect();
            panic!(
                "the call did not read `{name}`, only {}: name it in `input.reading(…)`",
                read.join(", ")
            )
        })
    }
}

/// The arguments of a call on device memory that someone else owns. Kernels read inputs and write
/// outputs where they are, in stream order and without waiting; over ranks the host waits only for
/// exchanges.
#[derive(Clone, Copy, Debug)]
pub struct RawCall<'a> {
    pub(crate) tokens: usize,
    pub(crate) tensors: &'a [(&'a str, Ptr)],
    pub(crate) capacity_factor: Option<f64>,
}

impl<'a> RawCall<'a> {
    /// Makes a call for `tokens` tokens. `tensors` are the addresses of inputs and outputs by name:
    /// `x` and `y` at least. Outputs that you do not name stay in the layer's memory. With an
    /// external router and `renormalize_after_drop` the layer rescales `topk_weights` in place.
    /// [`Layer::tensors`](crate::Layer::tensors) has the type and the size of each.
    ///
    /// # Safety
    /// Every address must be valid on the layer's device for the tensor's size at `tokens` tokens
    /// until the stream has passed the call, also if the call fails. Those of a training call must
    /// stay valid, and its inputs unchanged, until the stream has passed the last backward of what
    /// it saved. Ids of experts or tokens in inputs must be in range.
    pub unsafe fn new(tokens: usize, tensors: &'a [(&'a str, Ptr)]) -> RawCall<'a> {
        RawCall {
            tokens,
            tensors,
            capacity_factor: None,
        }
    }

    /// Sets a capacity factor for this call, as [`Input::capacity_factor`].
    #[must_use]
    pub fn with_capacity_factor(self, factor: impl Into<Option<f64>>) -> RawCall<'a> {
        RawCall {
            capacity_factor: factor.into(),
            ..self
        }
    }

    /// Returns the tokens of the call.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

/// The gradient of `y`: a tensor in host memory, or addresses on the device.
///
/// `&Tensor` and [`RawBackward`] convert into it.
#[derive(Clone, Copy, Debug)]
pub struct OutputGradient<'a>(pub(crate) BackwardArgs<'a>);

/// The arguments of a backward call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BackwardArgs<'c> {
    /// `dy` in host memory.
    Host(&'c Tensor<'c>),
    /// The addresses of `dy` and of results, for which the caller answers.
    Raw(&'c [(&'c str, Ptr)]),
}

impl<'a> From<&'a Tensor<'_>> for OutputGradient<'a> {
    fn from(dy: &'a Tensor<'_>) -> OutputGradient<'a> {
        OutputGradient(BackwardArgs::Host(dy))
    }
}

impl<'a> From<RawBackward<'a>> for OutputGradient<'a> {
    fn from(call: RawBackward<'a>) -> OutputGradient<'a> {
        OutputGradient(BackwardArgs::Raw(call.tensors))
    }
}

/// The arguments of a backward pass on device memory that someone else owns.
#[derive(Clone, Copy, Debug)]
pub struct RawBackward<'a> {
    tensors: &'a [(&'a str, Ptr)],
}

impl<'a> RawBackward<'a> {
    /// Makes a backward pass with the addresses of `dy` and of results by name: `dx`,
    /// `grad.topk_weights`, `grad.<weight>`. Results that you do not name stay in the layer's
    /// memory; over ranks gradients of weights always do.
    ///
    /// # Safety
    /// Every address must be valid on the layer's device for the tensor's size until the stream has
    /// passed the call, also if the call fails.
    pub unsafe fn new(tensors: &'a [(&'a str, Ptr)]) -> RawBackward<'a> {
        RawBackward { tensors }
    }
}

/// The time of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTime {
    /// The kernel's name.
    pub kernel: String,
    /// The entry's symbol.
    pub symbol: String,
    /// From launch to completion.
    pub time: Duration,
}

/// The key of a training call's random numbers. They depend only on this key, the token and the
/// slot, so a rank with the tokens from `first_token` on draws what one process would.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RngKey {
    /// The seed of the run.
    pub seed: u64,
    /// The optimizer step, or micro-batch.
    pub step: u64,
    /// The layer in its model.
    pub layer: u64,
    /// The number of this call's first token in the whole batch.
    pub first_token: u64,
}

/// Returns the shape of a tensor for a token count.
pub(crate) fn shape_for(tensor: &TensorPlan, tokens: usize) -> Vec<usize> {
    tensor
        .shape
        .iter()
        .map(|size| size.eval(tokens as u64) as usize)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output() -> Output {
        Output {
            tensors: Tensors::new().with("y", &[2], &[1.0f32, 2.0]),
        }
    }

    #[test]
    fn outputs_are_found_by_name() {
        assert_eq!(output()["y"].to_f32(), [1.0, 2.0]);
    }

    #[test]
    #[should_panic(expected = "did not read `topk_ids`, only y: name it in `input.reading(…)`")]
    fn an_output_that_was_not_read_is_named() {
        let _ = &output()["topk_ids"];
    }
}
