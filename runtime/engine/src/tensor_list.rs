//! The tensors of a layer's calls, as callers see them.

use crate::device_layer::{DeviceLayer, check_spec};
use crate::error::EngineError;
use crate::pass::{Pass, Ports};
use moesaic_kernel::{DType, Size, Target};
use moesaic_plan::{LayerPlan, PlanOptions, SATURATED, TensorId, TensorPlan, TensorRole, Training};
use moesaic_spec::{IndexError, IndexRange, LayerSpec};
use moesaic_tensor::{TensorError, TensorKind, check_kind};
use std::fmt;

/// A tensor that a layer's calls take or return, or that the layer holds.
///
/// Its `Display` is one line: `x [T, 64] bf16`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerTensor {
    /// The canonical name, such as `x`, `experts.up.weight` or `grad.experts.up.weight`.
    pub name: String,
    /// The element type.
    pub dtype: DType,
    /// The owner, and the direction.
    pub role: LayerTensorRole,
    /// The sizes, outermost first; row major. [`LayerTensor::shape`] computes them for a call.
    pub dims: Vec<TensorDim>,
    indices: Option<IndexRange>,
    /// Whether each call has it, by the number of the call.
    calls: [bool; LayerCall::ALL.len()],
}

/// The owner of a [`LayerTensor`], and the direction in which it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LayerTensorRole {
    /// You give it to every forward call: `x`, and what the spec's router and losses read.
    Input,
    /// You give it once, when you make the layer.
    Weight,
    /// A forward call returns it if you name it: `y`, `topk_ids`, `loss.switch`.
    Output,
    /// You give it to every backward call: `dy`.
    OutputGradient,
    /// A backward call returns it: `dx`, `grad.topk_weights`.
    InputGradient,
    /// Backward calls write it, or add to it: `grad.` and the name of a weight. The layer keeps it.
    WeightGradient,
}

/// One size of a [`LayerTensor`]. Its `Display` is `64`, `T` or `T*2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorDim {
    /// The same in every call.
    Fixed(usize),
    /// As many for each token of the call.
    PerToken(usize),
}

/// A call of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerCall {
    /// [`Layer::forward`](crate::Layer::forward) and
    /// [`Layer::forward_into`](crate::Layer::forward_into).
    Forward,
    /// [`Layer::forward_train`](crate::Layer::forward_train).
    ForwardTrain,
    /// [`Layer::route`](crate::Layer::route).
    Route,
    /// [`Layer::route`](crate::Layer::route) of a call
    /// [`in_training`](crate::CallInput::in_training).
    RouteTrain,
    /// [`Layer::backward`](crate::Layer::backward).
    Backward,
}

impl LayerCall {
    /// Every call, each at its number.
    pub const ALL: [LayerCall; 5] = [
        LayerCall::Forward,
        LayerCall::ForwardTrain,
        LayerCall::Route,
        LayerCall::RouteTrain,
        LayerCall::Backward,
    ];

    /// Returns the forward pass of the call; `None` for backward.
    fn pass(self) -> Option<Pass> {
        match self {
            LayerCall::Forward => Some(Pass::Evaluate),
            LayerCall::ForwardTrain => Some(Pass::Train),
            LayerCall::Route => Some(Pass::Route),
            LayerCall::RouteTrain => Some(Pass::RouteTrain),
            LayerCall::Backward => None,
        }
    }

    /// Returns whether only layers that train have the call.
    fn trains(self) -> bool {
        self.pass().is_none_or(Pass::trains)
    }
}

impl TensorDim {
    /// Returns the size in a call of `tokens` tokens.
    pub fn size(self, tokens: usize) -> usize {
        match self {
            TensorDim::Fixed(size) => size,
            TensorDim::PerToken(each) => tokens.saturating_mul(each),
        }
    }

    /// Returns whether the size depends on the tokens of a call.
    pub fn depends_on_tokens(self) -> bool {
        matches!(self, TensorDim::PerToken(_))
    }

    /// Returns a size of a plan.
    fn of(size: &Size) -> TensorDim {
        // Plans have more formulas than these, for scratch. A caller sees sizes that are fixed or a
        // multiple of the tokens, and two counts tell these apart, however they are written.
        match (size.eval(0), size.eval(1)) {
            (none, one) if none == one => TensorDim::Fixed(none as usize),
            (_, one) => TensorDim::PerToken(one as usize),
        }
    }
}

impl fmt::Display for TensorDim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TensorDim::Fixed(size) => write!(f, "{size}"),
            TensorDim::PerToken(1) => f.write_str("T"),
            TensorDim::PerToken(each) => write!(f, "T*{each}"),
        }
    }
}

impl LayerTensor {
    /// Returns the sizes in a call of `tokens` tokens. A tensor whose sizes are all fixed has the
    /// same ones for any number.
    pub fn shape(&self, tokens: usize) -> Vec<usize> {
        self.sizes(tokens).collect()
    }

    fn sizes(&self, tokens: usize) -> impl Iterator<Item = usize> {
        self.dims.iter().map(move |dim| dim.size(tokens))
    }

    /// Returns the bytes in a call of `tokens` tokens. The number saturates, so that no allocation
    /// of a call that is too large succeeds.
    pub fn bytes(&self, tokens: usize) -> usize {
        self.sizes(tokens)
            .fold(self.dtype.size(), usize::saturating_mul)
    }

    /// Returns whether a size depends on the tokens of a call.
    pub fn depends_on_tokens(&self) -> bool {
        self.dims.iter().any(|dim| dim.depends_on_tokens())
    }

    /// Returns whether a call takes or returns the tensor.
    ///
    /// Weights are of every call, and so is the output `comm_cast.saturated` of a layer over ranks.
    /// Another input or output is of [`LayerCall::Backward`] if backward reads what the training call
    /// left in it: memory of yours that you gave a [`RawCall`](crate::RawCall) must stay as it is
    /// until then.
    pub fn is_of(&self, call: LayerCall) -> bool {
        self.calls[call as usize]
    }

    /// Returns the name of the weight, of a weight and of a weight's gradient.
    pub fn weight(&self) -> Option<&str> {
        match self.role {
            LayerTensorRole::Weight => Some(&self.name),
            LayerTensorRole::WeightGradient => self.name.strip_prefix("grad."),
            _ => None,
        }
    }

    /// Checks the type and the sizes of memory for a call of `tokens` tokens.
    ///
    /// # Errors
    /// [`TensorError`], whose text belongs after the tensor's name.
    pub fn check(&self, found: TensorKind<'_>, tokens: usize) -> Result<(), TensorError> {
        // Compared without a list first, which would be an allocation for each tensor of a decode
        // call.
        let sizes = self.sizes(tokens);
        if found.dtype == self.dtype && found.shape.iter().copied().eq(sizes) {
            return Ok(());
        }
        let (dtype, shape) = (self.dtype, &*self.shape(tokens));
        check_kind(found, TensorKind { dtype, shape })
    }

    /// Returns the range of the numbers that you may give, where kernels take them for indices: ids
    /// of experts or tokens. Calls on host memory check them. For a
    /// [`RawCall`](crate::RawCall) they are yours to check, because kernels access memory by them.
    pub fn indices(&self) -> Option<IndexRange> {
        self.indices
    }

    /// Checks numbers that kernels take for indices; those of every other tensor pass.
    ///
    /// # Errors
    /// The first number out of range. The text belongs after the tensor's name.
    pub fn check_indices(&self, numbers: &[i32]) -> Result<(), IndexError> {
        self.indices.map_or(Ok(()), |range| range.check(numbers))
    }

    fn new(
        tensor: &TensorPlan,
        role: LayerTensorRole,
        plan: &LayerPlan,
        has: impl Fn(LayerCall) -> bool,
    ) -> LayerTensor {
        // An output of the same name holds old numbers before the call.
        let given = matches!(role, LayerTensorRole::Input | LayerTensorRole::Weight);
        // A plan for inference has ports of training passes all the same: those of evaluation.
        let trains = plan.training.is_some();
        LayerTensor {
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            role,
            dims: tensor.shape.iter().map(TensorDim::of).collect(),
            indices: plan.spec.indices(&tensor.name).filter(|_| given),
            calls: LayerCall::ALL.map(|call| (trains || !call.trains()) && has(call)),
        }
    }
}

impl fmt::Display for LayerTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> = self.dims.iter().map(ToString::to_string).collect();
        write!(f, "{} [{}] {}", self.name, dims.join(", "), self.dtype)
    }
}

/// Returns the tensors of a layer of one process before you make it: what
/// [`Layer::tensors`](crate::Layer::tensors) of the layer returns. It compiles nothing and needs no
/// device, so you learn which weights to bring. With `training` the list has what the calls of a
/// layer that trains take and return.
///
/// If experts of the spec are codes, a layer on a GPU holds the numbers that they stand for, and
/// these are listed. You bring the codes there, too:
/// [`canonical_tensors`](moesaic_spec::canonical_tensors) lists them.
///
/// # Errors
/// [`EngineError::Spec`], and [`EngineError::Plan`] for options that the target cannot have.
pub fn layer_tensors(
    spec: &LayerSpec,
    target: Target,
    training: impl Into<Option<Training>>,
) -> Result<Vec<LayerTensor>, EngineError> {
    check_spec(spec)?;
    let plan = moesaic_plan::plan(spec, target, &PlanOptions::training(training))?;
    let ports = Pass::ALL.map(|pass| pass.ports(&plan));
    let calls = of_calls(&plan, &ports, &plan.saved());
    Ok(in_order(calls, &plan, &plan.tensors))
}

/// Returns the tensors of a layer of one process.
pub(crate) fn of_one(layer: &DeviceLayer) -> Vec<LayerTensor> {
    let plan = layer.plan();
    let calls = of_calls(plan, &layer.ports, &layer.saved);
    in_order(calls, plan, &plan.tensors)
}

/// Returns the tensors of a rank's part of a layer: those of the dispatch part's calls, the count of
/// saturated values, and what the rank holds.
pub(crate) fn over_ranks<'t>(
    dispatch: &DeviceLayer,
    held: impl IntoIterator<Item = &'t TensorPlan>,
) -> Vec<LayerTensor> {
    let plan = dispatch.plan();
    let mut calls = of_calls(plan, &dispatch.ports, &dispatch.saved);
    // It is there under every strategy, zero where nothing is cast, so that code that asks for it
    // need not know the strategy.
    calls.push(saturated(plan));
    in_order(calls, plan, held)
}

/// Returns the output that casts between ranks add to every call.
pub(crate) fn saturated(plan: &LayerPlan) -> LayerTensor {
    let tensor = TensorPlan {
        name: SATURATED.to_string(),
        dtype: DType::I64,
        shape: vec![Size::Const(1)],
        role: TensorRole::Output,
    };
    LayerTensor::new(&tensor, LayerTensorRole::Output, plan, |_| true)
}

/// Returns the inputs and results of calls; `saved` are the tensors that backward reads.
fn of_calls(plan: &LayerPlan, ports: &[Ports; 4], saved: &[TensorId]) -> Vec<LayerTensor> {
    let each = plan.tensors.iter().enumerate();
    let listed = each.filter_map(|(at, tensor)| {
        let (id, role) = (TensorId(at), role(tensor)?);
        let has = |call: LayerCall| match (role, call.pass().map(|pass| &ports[pass as usize])) {
            (LayerTensorRole::Input, Some(ports)) => ports.inputs.contains(&id),
            (LayerTensorRole::Output, Some(ports)) => ports.outputs.contains(&id),
            (LayerTensorRole::Input | LayerTensorRole::Output, None) => saved.contains(&id),
            (_, ports) => ports.is_none(),
        };
        (!is_held(role)).then(|| LayerTensor::new(tensor, role, plan, has))
    });
    listed.collect()
}

/// Adds weights and their gradients to the tensors of calls, and orders all by role.
fn in_order<'t>(
    mut listed: Vec<LayerTensor>,
    plan: &LayerPlan,
    held: impl IntoIterator<Item = &'t TensorPlan>,
) -> Vec<LayerTensor> {
    listed.extend(held.into_iter().filter_map(|tensor| {
        let role = role(tensor).filter(|role| is_held(*role))?;
        let has = |call| role == LayerTensorRole::Weight || call == LayerCall::Backward;
        Some(LayerTensor::new(tensor, role, plan, has))
    }));
    // A stable sort: tensors of one role stay in the plan's order, weights in the canonical one.
    listed.sort_by_key(|tensor| tensor.role);
    listed
}

/// Returns the role of a tensor of a plan; `None` for those that are the layer's own affair.
fn role(tensor: &TensorPlan) -> Option<LayerTensorRole> {
    Some(match tensor.role {
        TensorRole::Input => LayerTensorRole::Input,
        TensorRole::Weight => LayerTensorRole::Weight,
        TensorRole::Output => LayerTensorRole::Output,
        // Other parts of a layer over ranks bring the other gradients of a dispatch part.
        TensorRole::OutputGradient if tensor.name == "dy" => LayerTensorRole::OutputGradient,
        TensorRole::InputGradient => LayerTensorRole::InputGradient,
        TensorRole::WeightGradient => LayerTensorRole::WeightGradient,
        TensorRole::OutputGradient | TensorRole::Packed | TensorRole::Scratch => return None,
    })
}

/// Returns whether the layer holds the tensor from call to call.
fn is_held(role: LayerTensorRole) -> bool {
    matches!(
        role,
        LayerTensorRole::Weight | LayerTensorRole::WeightGradient
    )
}
