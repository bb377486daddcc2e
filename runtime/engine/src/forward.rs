//! One forward pass: check the input, bind every step, launch, read back.

use crate::launch::Counters;
use crate::pass::Pass;
use crate::workspace;
use crate::{EngineError, Layer};
use moesaic_plan::{LayerPlan, TensorPlan, Tilings};
use moesaic_target::{Device, Ptr};
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

/// What a call gave, in host memory.
#[derive(Clone, Debug, Default)]
pub struct Output {
    pub(crate) tensors: Tensors<'static>,
}

impl Output {
    /// The tensor of this name, if it was asked for.
    pub fn get(&self, name: &str) -> Option<&Tensor<'static>> {
        self.tensors.get(name)
    }

    /// `y [T, output_dim]`, in the layer's activation dtype.
    pub fn y(&self) -> &Tensor<'static> {
        &self.tensors["y"]
    }

    /// Every tensor that was asked for, by name.
    pub fn into_tensors(self) -> Tensors<'static> {
        self.tensors
    }
}

/// A call on device memory that someone else owns.
#[derive(Clone, Debug, Default)]
pub struct RawCall<'a> {
    /// Tokens of this call.
    pub tokens: usize,
    /// Where input tensors lie and output tensors go, by name: `x` and `y`
    /// at least. Outputs that are not named stay in the layer's memory. With
    /// an external router and `renormalize_after_drop` the layer rescales
    /// `topk_weights` where they lie.
    pub tensors: &'a [(&'a str, Ptr)],
    /// As [`Input::capacity_factor`].
    pub capacity_factor: Option<f64>,
}

impl RawCall<'_> {
    /// Where the caller has a tensor.
    pub(crate) fn given(&self, name: &str) -> Option<Ptr> {
        let found = self.tensors.iter().find(|(given, _)| *given == name);
        found.map(|(_, ptr)| *ptr)
    }
}

/// How long one step took.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTime {
    /// The kernel's name.
    pub kernel: String,
    /// The entry's symbol.
    pub symbol: String,
    /// From launch to completion.
    pub time: Duration,
}

impl Layer {
    /// Evaluates the layer and reads back `y`.
    ///
    /// # Errors
    /// As [`Layer::forward_with`].
    pub fn forward(&self, input: &Input<'_>) -> Result<Output, EngineError> {
        self.forward_with(input, &["y"])
    }

    /// Evaluates the layer and reads back the named outputs. Nothing is drawn
    /// and nothing kept, also where the layer trains: it then gives what a layer
    /// for inference gives, to the bit. See [`Layer::forward_train`] for the
    /// other call.
    ///
    /// # Errors
    /// [`EngineError::Input`] when a tensor is missing or has the wrong shape
    /// or dtype; [`EngineError::Capacity`]; [`EngineError::NoOutput`] for an
    /// unknown name, [`EngineError::TrainingOutput`] for one that only training
    /// has, such as a loss; [`EngineError::Device`] when memory runs out or a
    /// launch fails.
    pub fn forward_with(&self, input: &Input<'_>, names: &[&str]) -> Result<Output, EngineError> {
        self.pass(Pass::Evaluate, input, names, Counters::default())
    }

    /// Decides where tokens go as [`Layer::forward_with`] does, and nothing
    /// else: `topk_ids`, `topk_weights`, `counts`, `locations`, `offsets`, and
    /// with a capacity `capacity` and `overflow`.
    ///
    /// # Errors
    /// As [`Layer::forward_with`].
    pub fn route(&self, input: &Input<'_>, names: &[&str]) -> Result<Output, EngineError> {
        self.pass(Pass::Route, input, names, Counters::default())
    }

    /// A pass that keeps nothing.
    pub(crate) fn pass(
        &self,
        pass: Pass,
        input: &Input<'_>,
        names: &[&str],
        counters: Counters,
    ) -> Result<Output, EngineError> {
        let mut workspaces = self.lock_workspaces();
        let scalars = self.scalars(pass, counters, input.tokens, input.capacity_factor)?;
        self.check_outputs(pass, names)?;
        self.reserve(&mut workspaces, input.tokens)?;
        self.stage(pass, input, names, |name| workspaces.get(name))?;
        if pass == Pass::Evaluate && self.plan().training.is_none() {
            workspaces.every.stage(input.tokens);
        }
        let ptr = |name: &str| workspaces.ptr(name);
        self.run(pass.steps(self.plan()), &scalars, ptr, None)?;
        self.read(names, input.tokens, |name| workspaces.get(name))
    }

    /// As [`Layer::forward_with`], on device memory that the caller owns, in
    /// stream order and without waiting.
    ///
    /// # Safety
    /// Every address must be valid on the layer's device for the tensor's
    /// size at `call.tokens` tokens until the stream has passed the call, and
    /// ids of experts or tokens in inputs must be in range.
    ///
    /// # Errors
    /// [`EngineError::Input`] when an input has no address,
    /// [`EngineError::Misaligned`] when kernels cannot use one; otherwise as
    /// [`Layer::forward`].
    pub unsafe fn forward_raw(&self, call: &RawCall<'_>) -> Result<(), EngineError> {
        // SAFETY: what the caller vouches for is the same.
        unsafe { self.pass_raw(Pass::Evaluate, call, Counters::default()) }
    }

    /// As [`Layer::route`], on device memory that the caller owns, in stream
    /// order and without waiting. Results go where `call` says.
    ///
    /// # Safety
    /// As [`Layer::forward_raw`].
    ///
    /// # Errors
    /// As [`Layer::forward_raw`].
    pub unsafe fn route_raw(&self, call: &RawCall<'_>) -> Result<(), EngineError> {
        // SAFETY: what the caller vouches for is the same.
        unsafe { self.pass_raw(Pass::Route, call, Counters::default()) }
    }

    /// A pass that keeps nothing, on the caller's memory.
    ///
    /// # Safety
    /// As [`Layer::forward_raw`].
    pub(crate) unsafe fn pass_raw(
        &self,
        pass: Pass,
        call: &RawCall<'_>,
        counters: Counters,
    ) -> Result<(), EngineError> {
        let mut workspaces = self.lock_workspaces();
        let scalars = self.scalars(pass, counters, call.tokens, call.capacity_factor)?;
        self.check_given(pass, call)?;
        self.reserve(&mut workspaces, call.tokens)?;
        let ptr = |name: &str| call.given(name).or_else(|| workspaces.ptr(name));
        self.run(pass.steps(self.plan()), &scalars, ptr, None)
    }

    /// Runs the steps again on the inputs of the last call, the first `tokens`
    /// of them, and times each: those of an evaluation, or where the layer
    /// trains of a call that did, backward too. For `bench` and the quickstart.
    ///
    /// # Errors
    /// When no call was that large, or a launch fails.
    pub fn time_steps(&self, tokens: usize) -> Result<Vec<StepTime>, EngineError> {
        let workspaces = self.lock_workspaces();
        if self.plan().training.is_some() {
            return self.time_training(tokens, &workspaces.every);
        }
        if !workspaces.every.has_staged(tokens) {
            return Err(untimed(tokens, "forward"));
        }
        let steps = Pass::Evaluate.steps(self.plan());
        let mut times = Vec::with_capacity(steps.len());
        let scalars = self.scalars(Pass::Evaluate, Counters::default(), tokens, None)?;
        let ptr = |name: &str| workspaces.ptr(name);
        self.run(steps, &scalars, ptr, Some(&mut times))?;
        Ok(times)
    }

    /// The most tokens of one call: assignments are counted in 31 bits.
    pub fn max_tokens(&self) -> usize {
        most_tokens(self.plan())
    }

    /// Whether a call can be that large, with memory for the tensors of the
    /// workspace and for `others`; `held` bytes are given back first.
    pub(crate) fn check_size(
        &self,
        held: u64,
        others: &[String],
        tokens: usize,
    ) -> Result<(), EngineError> {
        let others = others.iter().map(String::as_str);
        check_size(&self.tilings, others, &*self.device, held, tokens)
    }

    pub(crate) fn checked_input<'i, 'a>(
        &self,
        input: &'i Input<'a>,
        tensor: &TensorPlan,
    ) -> Result<&'i Tensor<'a>, EngineError> {
        let shape = shape_for(tensor, input.tokens);
        let host = input.tensors.get(&tensor.name).ok_or_else(|| {
            let problem = format!("is missing, expected {} of shape {shape:?}", tensor.dtype);
            input_error(&tensor.name, problem)
        })?;
        // Zero tokens have no width of their own.
        if input.tokens > 0 || !host.data.is_empty() {
            host.check(tensor.dtype, &shape)
                .map_err(|problem| input_error(&tensor.name, problem))?;
        }
        self.check_range(&tensor.name, host)?;
        Ok(host)
    }

    /// Ids index device memory, so they are checked before they go there.
    fn check_range(&self, name: &str, host: &Tensor<'_>) -> Result<(), EngineError> {
        let spec = &self.plan().spec;
        let (least, most) = match name {
            "token_ids" => (0, spec.router.table_rows.unwrap_or(0) as i32 - 1),
            // Below -1: a second expert that training let go.
            "topk_ids" => (
                -1 - spec.routed_experts() as i32,
                spec.routed_experts() as i32 - 1,
            ),
            "active_k" => (0, spec.shape.top_k as i32),
            _ => return Ok(()),
        };
        let ids: Vec<i32> = host.to_vec().unwrap_or_default();
        match ids.iter().position(|id| !(least..=most).contains(id)) {
            None => Ok(()),
            Some(at) => {
                let least = least.max(-1);
                let problem = format!("has {} at element {at}, expected {least}..={most}", ids[at]);
                Err(input_error(name, problem))
            }
        }
    }
}

/// Nothing can be timed on inputs that no call had.
pub(crate) fn untimed(tokens: usize, call: &str) -> EngineError {
    let problem = format!("has fewer than {tokens} tokens so far; run {call} on them first");
    input_error("x", problem)
}

fn most_tokens(plan: &LayerPlan) -> usize {
    i32::MAX as usize / plan.spec.shape.top_k
}

/// Whether a call can be that large, where `held` bytes are given back first.
pub(crate) fn check_size<'a>(
    tilings: &'a Tilings,
    others: impl Iterator<Item = &'a str>,
    device: &dyn Device,
    held: u64,
    tokens: usize,
) -> Result<(), EngineError> {
    let most = most_tokens(tilings.first());
    if tokens > most {
        let problem = format!("has {tokens} tokens; a call takes at most {most}, so split it");
        return Err(input_error("x", problem));
    }
    let needed = workspace::needed(tilings, others, tokens as u64);
    match device.free_bytes().map(|free| free.saturating_add(held)) {
        Some(free) if needed > free => Err(EngineError::NoRoom {
            tokens,
            needed,
            free,
        }),
        _ => Ok(()),
    }
}

/// The shape of a tensor for a token count.
pub(crate) fn shape_for(tensor: &TensorPlan, tokens: usize) -> Vec<usize> {
    tensor
        .shape
        .iter()
        .map(|size| size.eval(tokens as u64) as usize)
        .collect()
}

pub(crate) fn input_error(name: &str, problem: String) -> EngineError {
    EngineError::Input {
        name: name.to_string(),
        problem,
    }
}
