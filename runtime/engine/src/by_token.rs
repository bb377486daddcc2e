//! Several routers over the same experts, one for each token: routers by modality.
//!
//! Each router's tokens become a call of its own layer, and all calls share one pass over the
//! experts where [`MultiGate`] has one. Results return to the tokens' places.

use crate::call::{CallInput, Input, Output, RngKey};
use crate::error::EngineError;
use crate::multi_gate::{MultiGate, MultiSaved};
use crate::reason::{InputReason, OutputReason};
use moesaic_kernel::DType;
use moesaic_plan::{LayerPlan, TensorPlan};
use moesaic_spec::{LayerSpec, LossKind, Select};
use moesaic_tensor::Tensor;
use std::fmt;

/// The state that [`MultiGate::forward_train_by_token`] keeps for backward.
pub struct SavedByToken {
    places: Places,
    saved: MultiSaved,
}

impl fmt::Debug for SavedByToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SavedByToken")
            .field("tokens", &self.places.tokens)
            .finish_non_exhaustive()
    }
}

/// The places of each router's tokens in a call, ascending.
struct Places {
    tokens: usize,
    each: Vec<Vec<usize>>,
}

impl MultiGate {
    /// Evaluates the layer with one router for each token: `router_ids [T]` are places in
    /// [`MultiGate::layers`]. A token's results are those that its router's layer gives.
    ///
    /// Outputs by token are in the order of the tokens; `counts` and losses are sums over the
    /// routers, whose losses see their own tokens alone.
    ///
    /// # Errors
    /// As [`Layer::forward`](crate::Layer::forward); [`EngineError::Input`] for ids that name no
    /// router, and for a layer whose choice for a token depends on more than the token: with
    /// capacity, `expert-choice`, `sinkhorn`, `blocks`, or losses over sequences or ranks;
    /// [`EngineError::Output`] for other outputs.
    pub fn forward_by_token<'i>(
        &self,
        input: impl Into<CallInput<'i>>,
        router_ids: &[i32],
    ) -> Result<Output, EngineError> {
        let plan = self.plan(false)?;
        let (input, names) = input.into().args(plan)?.in_host_memory()?;
        check_outputs(plan, names)?;
        let places = Places::new(router_ids, self.layers.len(), input.tokens)?;
        let inputs = places.inputs(plan, &input)?;
        // Where experts see every token, the stack evaluates with one row for all routers of a
        // token. Here a token has one router, so layers one by one are as little work.
        let outputs = match self.stack.as_ref().filter(|stack| !stack.sees_all()) {
            Some(stack) => {
                let each: Vec<&Input<'_>> = inputs.iter().collect();
                stack.forward_stacked(&self.routers()?, &each, names)?
            }
            None => {
                let each = self.layers.iter().zip(&inputs);
                let calls = each.map(|(layer, input)| layer.forward(input.reading(names)));
                calls.collect::<Result<_, _>>()?
            }
        };
        Ok(places.joined(&outputs))
    }

    /// Runs the layer as in training with one router for each token, as
    /// [`MultiGate::forward_by_token`], keeping what backward needs.
    ///
    /// # Errors
    /// As [`MultiGate::forward_by_token`], and [`EngineError::Input`] for routers that draw random
    /// numbers, because these follow from a token's place among all tokens.
    pub fn forward_train_by_token<'i>(
        &self,
        input: impl Into<CallInput<'i>>,
        router_ids: &[i32],
        rng_key: RngKey,
    ) -> Result<(Output, SavedByToken), EngineError> {
        let plan = self.plan(true)?;
        let (input, names) = input.into().args(plan)?.in_host_memory()?;
        check_outputs(plan, names)?;
        let places = Places::new(router_ids, self.layers.len(), input.tokens)?;
        let inputs = places.inputs(plan, &input)?;
        let (outputs, saved) = self.train_on(&inputs, names, rng_key)?;
        let output = places.joined(&outputs);
        Ok((output, SavedByToken { places, saved }))
    }

    /// Runs backward from `dy [T, output_dim]`, in the order of the tokens. Gradients of experts
    /// are sums over all tokens, those of a router over its own.
    ///
    /// # Errors
    /// As [`Layer::backward`](crate::Layer::backward).
    pub fn backward_by_token(
        &self,
        saved: &SavedByToken,
        dy: &Tensor<'_>,
        accumulate: bool,
    ) -> Result<Output, EngineError> {
        // The call's own places: ids of a later call may name other routers.
        let places = &saved.places;
        let dy = places.rows_of("dy", dy)?;
        let outputs = self.backward(&saved.saved, &dy, accumulate)?;
        Ok(places.joined(&outputs))
    }

    /// Returns the plan that all routers have, if each token's choice follows from the token alone.
    fn plan(&self, training: bool) -> Result<&LayerPlan, EngineError> {
        let no_router = || EngineError::input("router_ids", InputReason::NoRouter);
        let layer = self.layers.first().ok_or_else(no_router)?;
        match beyond_one_token(layer.spec(), training) {
            None => Ok(layer.plan()),
            Some(key) => {
                let reason = InputReason::BeyondOneToken { key };
                Err(EngineError::input("router_ids", reason))
            }
        }
    }
}

/// Returns the key of an option by which a token's results depend on other tokens, or on its place
/// among them.
fn beyond_one_token(spec: &LayerSpec, training: bool) -> Option<&'static str> {
    // Their inputs describe all tokens of a call, and a router's layer sees a part of them.
    let losses = [LossKind::Sequence, LossKind::Global];
    let found = [
        (spec.may_drop(), "capacity"),
        (
            matches!(
                spec.router.select,
                Select::ExpertChoice(_) | Select::Sinkhorn(_)
            ),
            "router.select",
        ),
        (spec.router.blocks.is_some(), "router.blocks"),
        (
            spec.losses.iter().any(|loss| losses.contains(&loss.kind)),
            "a loss over sequences or ranks",
        ),
        (training && spec.draws(), "a router that draws"),
    ];
    let found = found.into_iter().find(|(found, _)| *found);
    found.map(|(_, key)| key)
}

/// Returns whether an output is a sum over tokens, so that those of routers add up.
fn is_sum(name: &str) -> bool {
    name == "counts" || name.starts_with("loss.")
}

/// Checks that the outputs of routers can be joined.
fn check_outputs(plan: &LayerPlan, names: &[&str]) -> Result<(), EngineError> {
    let joins = |name: &str| {
        // A name that the plan does not know is the layer's error.
        let of = plan.tensor(name);
        is_sum(name) || of.is_none_or(TensorPlan::is_by_token)
    };
    match names.iter().find(|name| !joins(name)) {
        None => Ok(()),
        Some(name) => Err(EngineError::output(name, OutputReason::PerRouter)),
    }
}

impl Places {
    fn new(router_ids: &[i32], routers: usize, tokens: usize) -> Result<Places, EngineError> {
        let wrong = |reason| Err(EngineError::input("router_ids", reason));
        if router_ids.len() != tokens {
            let found = router_ids.len();
            return wrong(InputReason::RouterIds { found, tokens });
        }
        let mut each = vec![Vec::new(); routers];
        for (token, &id) in router_ids.iter().enumerate() {
            let places = usize::try_from(id).ok().and_then(|id| each.get_mut(id));
            match places {
                Some(places) => places.push(token),
                None => {
                    return wrong(InputReason::RouterId {
                        found: id,
                        at: token,
                        routers,
                    });
                }
            }
        }
        Ok(Places { tokens, each })
    }

    /// Returns the input of each router's call.
    fn inputs(
        &self,
        plan: &LayerPlan,
        input: &Input<'_>,
    ) -> Result<Vec<Input<'static>>, EngineError> {
        let calls = self.each.iter().map(|places| Input {
            tokens: places.len(),
            capacity_factor: input.capacity_factor,
            ..Input::default()
        });
        let mut calls: Vec<Input<'static>> = calls.collect();
        for (name, tensor) in &input.tensors {
            // The others, such as `active_k`, are of the whole call, and so of each router's.
            let each = if plan.tensor(name).is_some_and(TensorPlan::is_by_token) {
                self.rows_of(name, tensor)?
            } else {
                vec![tensor.clone().into_static(); calls.len()]
            };
            for (call, tensor) in calls.iter_mut().zip(each) {
                call.insert(name, tensor);
            }
        }
        Ok(calls)
    }

    /// Returns each router's rows of a tensor with a row for each token.
    fn rows_of(
        &self,
        name: &str,
        tensor: &Tensor<'_>,
    ) -> Result<Vec<Tensor<'static>>, EngineError> {
        let shape = &tensor.shape;
        let width = shape.iter().skip(1).product::<usize>() * tensor.dtype.size();
        if shape.first() != Some(&self.tokens) || tensor.data.len() != self.tokens * width {
            let reason = InputReason::RowPerToken {
                shape: shape.clone(),
                tokens: self.tokens,
            };
            return Err(EngineError::input(name, reason));
        }
        let of_router = |places: &Vec<usize>| {
            let mut rows = Tensor::zeros(tensor.dtype, &with_rows(shape, places.len()));
            let to = rows.data.to_mut().chunks_exact_mut(width.max(1));
            for (to, place) in to.zip(places) {
                to.copy_from_slice(&tensor.data[place * width..][..width]);
            }
            rows
        };
        Ok(self.each.iter().map(of_router).collect())
    }

    /// Joins the outputs of all routers.
    fn joined(&self, outputs: &[Output]) -> Output {
        let mut joined = Output::default();
        for name in outputs[0].tensors.keys() {
            let each: Vec<&Tensor<'_>> = outputs.iter().map(|out| &out.tensors[name]).collect();
            let tensor = if is_sum(name) {
                sum(&each)
            } else {
                self.in_order(&each)
            };
            joined.tensors.insert(name.clone(), tensor);
        }
        joined
    }

    /// Puts the rows of all routers into the order of the tokens.
    fn in_order(&self, each: &[&Tensor<'_>]) -> Tensor<'static> {
        // Each router's output has the width of its rows, also without any token.
        let mut all = Tensor::zeros(each[0].dtype, &with_rows(&each[0].shape, self.tokens));
        let width = all.data.len() / self.tokens.max(1);
        let data = all.data.to_mut();
        for (places, rows) in self.each.iter().zip(each) {
            for (place, from) in places.iter().zip(rows.data.chunks_exact(width.max(1))) {
                data[place * width..][..width].copy_from_slice(from);
            }
        }
        all
    }
}

/// Returns a shape with this number of rows.
fn with_rows(shape: &[usize], rows: usize) -> Vec<usize> {
    let rest = shape.iter().skip(1).copied();
    std::iter::once(rows).chain(rest).collect()
}

/// Adds tensors of one shape up: counts exactly, losses in f64.
fn sum(each: &[&Tensor<'_>]) -> Tensor<'static> {
    // Counts are below 2^53, so f64 holds them exactly, too.
    let mut total = vec![0.0; each[0].to_f64().len()];
    for tensor in each {
        let values = tensor.to_f64();
        total
            .iter_mut()
            .zip(values)
            .for_each(|(total, value)| *total += value);
    }
    let shape = &each[0].shape;
    match each[0].dtype {
        DType::I32 => Tensor::owned(shape, total.iter().map(|&n| n as i32).collect::<Vec<_>>()),
        DType::I64 => Tensor::owned(shape, total.iter().map(|&n| n as i64).collect::<Vec<_>>()),
        dtype => {
            let values: Vec<f32> = total.iter().map(|&value| value as f32).collect();
            Tensor::rounded(dtype, shape, &values).into_static()
        }
    }
}
