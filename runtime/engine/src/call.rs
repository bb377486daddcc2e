//! Inputs and outputs of calls.

use crate::error::EngineError;
use moesaic_kernel::DType;
use moesaic_plan::TensorPlan;
use moesaic_target::Ptr;
use moesaic_tensor::{Element, Tensor, Tensors};
use std::time::Duration;

/// The input of a call, in host memory.
#[derive(Clone, Debug, Default)]
pub struct Input<'a> {
    /// Tokens of this call.
    pub tokens: usize,
    /// The tensors: `x [T, d]`; `token_ids [T]` i32 for a table router;
    /// `topk_ids [T, K]` i32 and `topk_weights [T, K]` f32 for an external one.
    pub tensors: Tensors<'a>,
    /// The capacity factor of this call instead of the spec's, by the same
    /// formula; for modes `factor` and `bounded`.
    pub capacity_factor: Option<f64>,
}

impl<'a> Input<'a> {
    /// `tokens` rows of `x`, which holds `tokens * model_dim` elements.
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

    /// Adds or replaces a tensor.
    pub fn insert(&mut self, name: &str, tensor: Tensor<'a>) {
        self.tensors.insert(name.to_string(), tensor);
    }
}

/// The input of a call that allocates nothing: the rows of `x` alone, for a layer that reads no
/// other input, or a whole [`Input`].
///
/// `&[f32]`, `&Vec<f32>`, slices of the other [`Element`]s and `&Input` convert into it.
#[derive(Clone, Copy, Debug)]
pub struct CallInput<'a>(pub(crate) Given<'a>);

/// The forms of a [`CallInput`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Given<'a> {
    /// The rows of `x`, as many as fill the slice.
    Rows {
        dtype: DType,
        bytes: &'a [u8],
    },
    Input(&'a Input<'a>),
}

impl<'a, E: Element> From<&'a [E]> for CallInput<'a> {
    fn from(rows: &'a [E]) -> CallInput<'a> {
        CallInput(Given::Rows {
            dtype: E::DTYPE,
            bytes: bytemuck::cast_slice(rows),
        })
    }
}

impl<'a, E: Element> From<&'a Vec<E>> for CallInput<'a> {
    fn from(rows: &'a Vec<E>) -> CallInput<'a> {
        rows.as_slice().into()
    }
}

impl<'a> From<&'a Input<'_>> for CallInput<'a> {
    fn from(input: &'a Input<'_>) -> CallInput<'a> {
        CallInput(Given::Input(input))
    }
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

    /// `y [T, output_dim]`, in the layer's activation dtype.
    pub fn y(&self) -> &Tensor<'static> {
        &self.tensors["y"]
    }

    /// Returns every tensor that the call asked for, by name.
    pub fn into_tensors(self) -> Tensors<'static> {
        self.tensors
    }
}

/// A call on device memory that someone else owns.
#[derive(Clone, Debug, Default)]
pub struct RawCall<'a> {
    /// Tokens of this call.
    pub tokens: usize,
    /// The addresses of input and output tensors by name: `x` and `y` at least. Outputs that you do
    /// not name stay in the layer's memory. With an external router and `renormalize_after_drop`
    /// the layer rescales `topk_weights` in place.
    pub tensors: &'a [(&'a str, Ptr)],
    /// As [`Input::capacity_factor`].
    pub capacity_factor: Option<f64>,
}

/// A backward pass on device memory that someone else owns.
#[derive(Clone, Debug)]
pub struct RawBackward<'a> {
    /// The addresses of `dy` and of results by name: `dx`, `grad.topk_weights`, `grad.<weight>`.
    /// Results that you do not name stay in the layer's memory.
    pub tensors: &'a [(&'a str, Ptr)],
    /// Whether the pass adds to weight gradients instead of overwriting them.
    pub accumulate: bool,
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

/// The position of a training call, for random numbers: these depend on the position, the token and
/// the slot, and on nothing else. So a rank with the tokens from `first_token` on draws what one
/// process would.
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

/// The shape of a tensor for a token count.
pub(crate) fn shape_for(tensor: &TensorPlan, tokens: usize) -> Vec<usize> {
    tensor
        .shape
        .iter()
        .map(|size| size.eval(tokens as u64) as usize)
        .collect()
}

/// Returns the error of memory for an output.
pub(crate) fn output_error(name: &str, problem: String) -> EngineError {
    EngineError::Output {
        name: name.to_string(),
        problem,
    }
}

pub(crate) fn input_error(name: &str, problem: String) -> EngineError {
    EngineError::Input {
        name: name.to_string(),
        problem,
    }
}
