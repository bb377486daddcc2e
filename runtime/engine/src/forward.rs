//! One forward pass: check the input, bind every step, launch, read back.

use crate::launch::Counters;
use crate::workspace::{self, Workspace};
use crate::{Element, EngineError, HostTensor, Layer};
use moesaic_plan::{LayerPlan, Role, TensorPlan, Tilings};
use moesaic_target::{Device, Ptr};
use std::collections::BTreeMap;
use std::time::Duration;

/// The input of a call, in host memory.
#[derive(Clone, Debug)]
pub struct Input<'a> {
    /// Tokens of this call.
    pub tokens: usize,
    /// The tensors: `x [T, d]`; `token_ids [T]` i32 for a table router;
    /// `topk_ids [T, K]` i32 and `topk_weights [T, K]` f32 for an external one.
    pub tensors: BTreeMap<String, HostTensor<'a>>,
}

impl<'a> Input<'a> {
    /// `tokens` rows of `x`, which holds `tokens * model_dim` elements.
    pub fn new<E: Element>(tokens: usize, x: &'a [E]) -> Input<'a> {
        let width = x.len().checked_div(tokens).unwrap_or(0);
        let mut input = Input {
            tokens,
            tensors: BTreeMap::new(),
        };
        input.insert("x", HostTensor::new(&[tokens, width], x));
        input
    }

    /// This input with the ids that a table router looks up.
    pub fn with_token_ids(mut self, token_ids: &'a [i32]) -> Input<'a> {
        self.insert("token_ids", HostTensor::new(&[token_ids.len()], token_ids));
        self
    }

    /// This input with the decision that an external router made.
    pub fn with_routing(mut self, top_k: usize, ids: &'a [i32], weights: &'a [f32]) -> Input<'a> {
        self.insert("topk_ids", HostTensor::new(&[self.tokens, top_k], ids));
        self.insert(
            "topk_weights",
            HostTensor::new(&[self.tokens, top_k], weights),
        );
        self
    }

    /// Adds or replaces a tensor.
    pub fn insert(&mut self, name: &str, tensor: HostTensor<'a>) {
        self.tensors.insert(name.to_string(), tensor);
    }
}

/// What a call gave, in host memory.
#[derive(Clone, Debug, Default)]
pub struct Output {
    pub(crate) tensors: BTreeMap<String, HostTensor<'static>>,
}

impl Output {
    /// The tensor of this name, if it was asked for.
    pub fn get(&self, name: &str) -> Option<&HostTensor<'static>> {
        self.tensors.get(name)
    }

    /// `y [T, output_dim]`, in the layer's activation dtype.
    pub fn y(&self) -> &HostTensor<'static> {
        &self.tensors["y"]
    }

    /// Every tensor that was asked for, by name.
    pub fn into_tensors(self) -> BTreeMap<String, HostTensor<'static>> {
        self.tensors
    }
}

/// A call on device memory that someone else owns.
#[derive(Clone, Debug)]
pub struct RawCall<'a> {
    /// Tokens of this call.
    pub tokens: usize,
    /// Where input tensors lie and output tensors go, by name: `x` and `y`
    /// at least. Outputs that are not named stay in the layer's memory. With
    /// an external router and `renormalize_after_drop` the layer rescales
    /// `topk_weights` where they lie.
    pub tensors: &'a [(&'a str, Ptr)],
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
    /// Runs the layer and reads back `y`.
    ///
    /// # Errors
    /// [`EngineError::Input`] when a tensor is missing or has the wrong shape
    /// or dtype; [`EngineError::Device`] when memory runs out or a launch fails.
    pub fn forward(&self, input: &Input<'_>) -> Result<Output, EngineError> {
        self.forward_with(input, &["y"])
    }

    /// Runs the layer and reads back the named outputs. A layer for training
    /// needs what only its losses read where a loss is among them.
    ///
    /// # Errors
    /// As [`Layer::forward`]; [`EngineError::NoOutput`] for an unknown name.
    pub fn forward_with(&self, input: &Input<'_>, names: &[&str]) -> Result<Output, EngineError> {
        if self.plan().training.is_some() {
            let input = self.with_idle_losses(input, names);
            let (output, _) = self.forward_train(&input, names, Counters::default())?;
            return Ok(output);
        }
        let mut workspace = self.lock_workspace();
        self.check_size(&workspace, input.tokens)?;
        for name in names {
            self.output(name)?;
        }
        workspace.reserve(&self.tilings, &*self.device, input.tokens as u64)?;
        self.stage(input, |name| workspace.get(name))?;
        let counters = Counters::default();
        let scalars = counters.scalars(input.tokens);
        let ptr = |name: &str| workspace.ptr(name);
        self.run(&self.plan().steps, &scalars, ptr, None)?;
        self.read(names, input.tokens, |name| workspace.get(name))
    }

    /// The input, where nobody asks for a loss with zeros for what only losses
    /// read.
    fn with_idle_losses<'i>(&self, input: &'i Input<'_>, names: &[&str]) -> Input<'i> {
        let given = |(name, host): (&String, &'i HostTensor<'_>)| (name.clone(), host.borrowed());
        let mut input = Input {
            tokens: input.tokens,
            tensors: input.tensors.iter().map(given).collect(),
        };
        if names.iter().any(|name| name.starts_with("loss.")) {
            return input;
        }
        let of_losses = |tensor: &&TensorPlan| LOSS_INPUTS.contains(&&*tensor.name);
        for tensor in self.tensors(Role::Input).filter(of_losses) {
            let zeros = || zeros(tensor, input.tokens);
            input
                .tensors
                .entry(tensor.name.clone())
                .or_insert_with(zeros);
        }
        input
    }

    /// Runs the layer on device memory that the caller owns, in stream order
    /// and without waiting.
    ///
    /// # Safety
    /// Every address must be valid on the layer's device for the tensor's
    /// size at `call.tokens` tokens until the stream has passed the call, and
    /// ids of experts or tokens in inputs must be in range.
    ///
    /// # Errors
    /// [`EngineError::Input`] when an input has no address; otherwise as
    /// [`Layer::forward`].
    pub unsafe fn forward_raw(&self, call: &RawCall<'_>) -> Result<(), EngineError> {
        if self.plan().training.is_some() {
            // SAFETY: what the caller vouches for is the same.
            unsafe { self.forward_train_raw(call, Counters::default())? };
            return Ok(());
        }
        let mut workspace = self.lock_workspace();
        self.check_size(&workspace, call.tokens)?;
        let given = |name: &str| {
            call.tensors
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, p)| *p)
        };
        self.check_given(call)?;
        workspace.reserve(&self.tilings, &*self.device, call.tokens as u64)?;
        self.run(
            &self.plan().steps,
            &Counters::default().scalars(call.tokens),
            |name| given(name).or_else(|| workspace.ptr(name)),
            None,
        )
    }

    /// Runs the steps again on the inputs of the last call, the first `tokens`
    /// of them, and times each; with backward, where the layer has it and a call
    /// went through it. For `bench` and the quickstart.
    ///
    /// # Errors
    /// When no call was that large, or a launch fails.
    pub fn time_steps(&self, tokens: usize) -> Result<Vec<StepTime>, EngineError> {
        let workspace = self.lock_workspace();
        if !workspace.holds(tokens as u64) {
            let problem =
                format!("has fewer than {tokens} tokens so far; run forward on them first");
            return Err(input_error("x", problem));
        }
        if self.plan().training.is_some() {
            drop(workspace);
            return self.time_training(tokens);
        }
        let mut times = Vec::with_capacity(self.plan().steps.len());
        let scalars = Counters::default().scalars(tokens);
        let ptr = |name: &str| workspace.ptr(name);
        self.run(&self.plan().steps, &scalars, ptr, Some(&mut times))?;
        Ok(times)
    }

    /// The most tokens of one call: assignments are counted in 31 bits.
    pub fn max_tokens(&self) -> usize {
        most_tokens(self.plan())
    }

    pub(crate) fn check_size(
        &self,
        workspace: &Workspace,
        tokens: usize,
    ) -> Result<(), EngineError> {
        if workspace.holds(tokens as u64) {
            return Ok(());
        }
        check_size(&self.tilings, &*self.device, workspace.bytes(), tokens)
    }

    pub(crate) fn checked_input<'i, 'a>(
        &self,
        input: &'i Input<'a>,
        tensor: &TensorPlan,
    ) -> Result<&'i HostTensor<'a>, EngineError> {
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
    fn check_range(&self, name: &str, host: &HostTensor<'_>) -> Result<(), EngineError> {
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

    pub(crate) fn output(&self, name: &str) -> Result<&TensorPlan, EngineError> {
        let readable =
            |t: &&TensorPlan| matches!(t.role, Role::Output | Role::Input | Role::InputGradient);
        let mut outputs = self.plan().tensors.iter().filter(readable);
        outputs
            .clone()
            .find(|tensor| tensor.name == name)
            .ok_or_else(|| EngineError::NoOutput {
                name: name.to_string(),
                known: join(&mut outputs),
            })
    }

    pub(crate) fn empty_output(
        &self,
        name: &str,
        tokens: usize,
    ) -> Result<HostTensor<'static>, EngineError> {
        Ok(zeros(self.output(name)?, tokens))
    }
}

/// Inputs that only auxiliary losses read.
const LOSS_INPUTS: [&str; 3] = ["sequence_ids", "global_counts", "global_tokens"];

/// The tensor for a token count, all zero.
fn zeros(tensor: &TensorPlan, tokens: usize) -> HostTensor<'static> {
    let shape = shape_for(tensor, tokens);
    let bytes = shape.iter().product::<usize>() * tensor.dtype.size();
    HostTensor {
        dtype: tensor.dtype,
        shape,
        data: vec![0; bytes].into(),
    }
}

fn most_tokens(plan: &LayerPlan) -> usize {
    i32::MAX as usize / plan.spec.shape.top_k
}

/// Whether a call can be that large, where `held` bytes are given back first.
pub(crate) fn check_size(
    tilings: &Tilings,
    device: &dyn Device,
    held: u64,
    tokens: usize,
) -> Result<(), EngineError> {
    let most = most_tokens(tilings.first());
    if tokens > most {
        let problem = format!("has {tokens} tokens; a call takes at most {most}, so split it");
        return Err(input_error("x", problem));
    }
    let needed = workspace::needed(tilings, tokens as u64);
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

fn join(tensors: &mut dyn Iterator<Item = &TensorPlan>) -> String {
    tensors
        .map(|tensor| tensor.name.as_str())
        .collect::<Vec<_>>()
        .join(", ")
}
