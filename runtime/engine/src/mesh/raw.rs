//! Calls of a rank on device memory that someone else owns.
//!
//! Kernels use the caller's tensors where they lie. What ranks exchange lies in the layer's own
//! memory: an exchange may still be in flight when a call has failed, and then keeps the memory
//! that it uses, which it cannot with a caller's. So the few tensors of a call that exchanges
//! move are copied on the device, in the order of its stream: `x` and `dy` where shared experts
//! are sliced, and numbers such as `counts`.

use super::calls::{Dy, Given, MeshSaved};
use super::layer::MeshLayer;
use super::run::Run;
use crate::call::{RawBackward, RawCall, RngKey, input_error};
use crate::error::EngineError;
use crate::pass::Pass;
use moesaic_plan::{CollectiveOp, RankPlan, RankStep, Role, SATURATED, TensorId};
use moesaic_target::{Buffer, Ptr};
use std::collections::BTreeSet;
use std::sync::Arc;

impl MeshLayer {
    /// As [`MeshLayer::forward_with`], on device memory that the caller owns: this rank's tokens
    /// are read and its results written there, in stream order. The host waits for what ranks
    /// tell each other and for exchanges, not for the launches after them.
    ///
    /// # Safety
    /// As [`Layer::forward_raw`](crate::Layer::forward_raw), also when the call fails.
    ///
    /// # Errors
    /// As [`Layer::forward_raw`](crate::Layer::forward_raw); [`EngineError::Input`] for a
    /// weight, which lies with its rank; [`EngineError::Collective`].
    pub unsafe fn forward_raw(&self, call: &RawCall<'_>) -> Result<(), EngineError> {
        self.evaluate(&Given::Raw(call))?.hand_over()
    }

    /// As [`MeshLayer::route`], on device memory that the caller owns.
    ///
    /// # Safety
    /// As [`MeshLayer::forward_raw`].
    ///
    /// # Errors
    /// As [`MeshLayer::forward_raw`].
    pub unsafe fn route_raw(&self, call: &RawCall<'_>) -> Result<(), EngineError> {
        let run = self.decide(Pass::Route, &Given::Raw(call), RngKey::default())?;
        run.hand_over()
    }

    /// As [`MeshLayer::route_train`], on device memory that the caller owns.
    ///
    /// # Safety
    /// As [`MeshLayer::forward_raw`].
    ///
    /// # Errors
    /// As [`MeshLayer::forward_raw`] and [`MeshLayer::route_train`].
    pub unsafe fn route_train_raw(
        &self,
        call: &RawCall<'_>,
        rng_key: RngKey,
    ) -> Result<(), EngineError> {
        self.tokens.check_training()?;
        let run = self.decide(Pass::RouteTrain, &Given::Raw(call), rng_key)?;
        run.hand_over()
    }

    /// As [`MeshLayer::loads`] with the tokens of a call on device memory, or without an RNG key as
    /// [`MeshLayer::evaluation_loads`]. Nothing is written there.
    ///
    /// # Safety
    /// As [`MeshLayer::forward_raw`].
    ///
    /// # Errors
    /// As [`MeshLayer::route_raw`] and [`MeshLayer::route_train_raw`].
    pub unsafe fn loads_raw(
        &self,
        call: &RawCall<'_>,
        rng_key: Option<RngKey>,
    ) -> Result<Vec<Vec<u64>>, EngineError> {
        let pass = match rng_key {
            Some(_) => Pass::RouteTrain,
            None => Pass::Route,
        };
        if pass.trains() {
            self.tokens.check_training()?;
        }
        let is_input = |(name, _): &&(&str, Ptr)| {
            let tensor = self.tokens.plan().tensor(name);
            tensor.is_some_and(|tensor| tensor.role == Role::Input)
        };
        let tensors: Vec<(&str, Ptr)> = call.tensors.iter().filter(is_input).copied().collect();
        let call = RawCall {
            tensors: &tensors,
            ..*call
        };
        let run = self.decide(pass, &Given::Raw(&call), rng_key.unwrap_or_default())?;
        let output = run.read(&["counts"])?;
        drop(run); // its groups are needed
        self.loads_of(&output)
    }

    /// As [`MeshLayer::forward_train`], on device memory that the caller owns. Inputs stay where
    /// they are.
    ///
    /// # Safety
    /// As [`MeshLayer::forward_raw`]; what the call names must stay valid and unchanged until the
    /// stream has passed the last backward of the result.
    ///
    /// # Errors
    /// As [`MeshLayer::forward_raw`] and [`MeshLayer::forward_train`].
    pub unsafe fn forward_train_raw(
        &self,
        call: &RawCall<'_>,
        rng_key: RngKey,
    ) -> Result<MeshSaved, EngineError> {
        let run = self.train(&Given::Raw(call), rng_key)?;
        run.hand_over()?;
        Ok(self.saved(run))
    }

    /// As [`MeshLayer::backward`], on device memory that the caller owns: `dy`, `dx` and
    /// `grad.topk_weights` of this rank's tokens. Gradients of weights stay in the layer's
    /// memory, where [`MeshLayer::reduce_gradients`] adds them up;
    /// [`Layer::gradient_ptr`](crate::Layer::gradient_ptr) of [`MeshLayer::side_of`] says where.
    ///
    /// # Safety
    /// As [`Layer::backward_raw`](crate::Layer::backward_raw), also when the call fails.
    ///
    /// # Errors
    /// As [`Layer::backward_raw`](crate::Layer::backward_raw); [`EngineError::Input`] for the
    /// gradient of a weight; [`EngineError::Collective`].
    pub unsafe fn backward_raw(
        &self,
        saved: &MeshSaved,
        call: &RawBackward<'_>,
    ) -> Result<(), EngineError> {
        let run = self.back(saved, &Dy::Raw(call.tensors), call.accumulate)?;
        run.hand_over()
    }
}

/// What a raw call has of the dispatch part in memory that kernels do not use: tensors of the
/// layer, each with the caller's memory for it.
#[derive(Default)]
pub(super) struct Beside {
    tensors: Vec<(TensorId, Arc<Buffer>)>,
    /// Where [`SATURATED`] goes, which is no tensor of the layer.
    saturated: Option<Arc<Buffer>>,
}

impl Run<'_> {
    /// Takes the tensors of these roles that a caller has for so many tokens, before there is
    /// room for the call. All of `inputs` must be there.
    pub(super) fn take(
        &mut self,
        (tokens, tensors): (usize, &[(&str, Ptr)]),
        inputs: &[TensorId],
        roles: [Role; 2],
    ) -> Result<(), EngineError> {
        let layer = self.tokens.layer;
        self.refuse_weights(tensors)?;
        let role = |name: &str| layer.id(name).map(|id| layer.plan()[id].role);
        let is_port = |(name, _): &&(&str, Ptr)| role(name).is_some_and(|r| roles.contains(&r));
        let ports: Vec<(&str, Ptr)> = tensors.iter().filter(is_port).copied().collect();
        let mut found = Vec::new();
        layer.find_given((tokens, &ports), inputs, &mut found)?;
        let mut taken = BTreeSet::new();
        // Of two addresses the first counts.
        for (id, address) in found.into_iter().filter(|(id, _)| taken.insert(*id)) {
            if self.exchanged.contains(&id) {
                let bytes = layer.plan()[id].bytes(tokens as u64);
                self.beside.tensors.push((id, theirs(address, bytes)));
            } else {
                self.tokens.given.push((id, address));
            }
        }
        let count = tensors.iter().find(|(name, _)| *name == SATURATED);
        self.beside.saturated = match count {
            Some((name, Ptr(0))) => return Err(input_error(name, NOWHERE.to_string())),
            Some((_, address)) => Some(theirs(*address, COUNT_BYTES)),
            None => None,
        };
        Ok(())
    }

    /// Weights and their gradients lie with their ranks, who add gradients up there.
    fn refuse_weights(&self, tensors: &[(&str, Ptr)]) -> Result<(), EngineError> {
        let is_weight = |name: &str| {
            let mut parts = self.plan.parts();
            parts.any(|plan| plan.tensor(name).is_some_and(|t| t.role == Role::Weight))
        };
        for (name, _) in tensors {
            let problem = match name.strip_prefix("grad.") {
                Some(weight) if is_weight(weight) => {
                    "stays in the layer's memory on a mesh, where ranks add it up; leave it out, \
                     and ask `gradient_ptr` of `side_of` where it lies"
                }
                None if is_weight(name) => {
                    "stays in the layer's memory on a mesh; leave it out, and replace it by \
                     `set_weight`"
                }
                _ => continue,
            };
            return Err(input_error(name, problem.to_string()));
        }
        Ok(())
    }

    /// Copies inputs that exchanges move to the layer's own memory, once there is room.
    pub(super) fn bring(&self) -> Result<(), EngineError> {
        let inputs = self.beside([Role::Input, Role::OutputGradient]);
        inputs
            .into_iter()
            .try_for_each(|[own, theirs]| self.carry(theirs, own, theirs.bytes()))
    }

    /// Copies results that exchanges move to the caller's memory, when the pass has been
    /// launched.
    pub(super) fn hand_over(&self) -> Result<(), EngineError> {
        let results = self.beside([Role::Output, Role::InputGradient]);
        results
            .into_iter()
            .try_for_each(|[own, theirs]| self.carry(own, theirs, theirs.bytes()))?;
        let Some(to) = &self.beside.saturated else {
            return Ok(());
        };
        match &self.cast {
            Some(cast) => self.carry(cast.packing.saturated(), to, to.bytes()),
            None => Ok(self.owned.device.upload(&0i64.to_le_bytes(), to, 0)?),
        }
    }

    /// Tensors of these roles, the layer's memory and the caller's.
    fn beside(&self, roles: [Role; 2]) -> Vec<[&Arc<Buffer>; 2]> {
        let plan = self.tokens.layer.plan();
        let tensors = self.beside.tensors.iter();
        let tensors = tensors.filter(|(id, _)| roles.contains(&plan[*id].role));
        tensors
            .map(|(id, theirs)| [self.tokens.buffer(*id), theirs])
            .collect()
    }

    fn carry(&self, from: &Arc<Buffer>, to: &Arc<Buffer>, bytes: usize) -> Result<(), EngineError> {
        for first in (0..bytes).step_by(PIECE) {
            let bytes = PIECE.min(bytes - first);
            self.copy_bytes((from, first), (to, first), bytes)?;
        }
        Ok(())
    }
}

/// Bytes of [`SATURATED`].
const COUNT_BYTES: u64 = 8;

/// Bytes that are copied at once: a GPU's copy of rows takes rows of less than 2 GiB.
const PIECE: usize = 1 << 30;

/// What is wrong with address 0.
const NOWHERE: &str = "lies at address 0, where no memory is";

/// A caller's memory, of which nothing is freed here.
fn theirs(address: Ptr, bytes: u64) -> Arc<Buffer> {
    Arc::new(Buffer::new(address, bytes as usize, Box::new(())))
}

/// The tensors of the dispatch part that exchanges move, or the host reads for them.
pub(super) fn exchanged(plan: &RankPlan) -> BTreeSet<TensorId> {
    let steps = plan.steps.iter().chain(&plan.evaluation);
    let exchanges = steps.chain(&plan.backward).filter_map(RankStep::exchange);
    let moved = exchanges.flat_map(|exchange| of_tokens(&exchange.op));
    let read = ["offsets", "row_slots"];
    let read = read.into_iter().filter_map(|name| plan.tokens.id(name));
    moved.flatten().chain(read).collect()
}

/// Those of one exchange.
fn of_tokens(way: &CollectiveOp) -> [Option<TensorId>; 2] {
    match *way {
        CollectiveOp::Dispatch { from, .. }
        | CollectiveOp::KeepShadowRows { from, .. }
        | CollectiveOp::AllGatherTp { from, .. } => [Some(from), None],
        CollectiveOp::Combine { to, .. }
        | CollectiveOp::ReturnShadowRows { to, .. }
        | CollectiveOp::ReduceScatterTp { to, .. }
        | CollectiveOp::BroadcastTp { to, .. }
        | CollectiveOp::AllGatherExperts { to, .. } => [Some(to), None],
        CollectiveOp::AllReduceSum { from, to }
        | CollectiveOp::CountLiveTokens { ids: from, to } => [Some(from), Some(to)],
        CollectiveOp::AllReduceMax { tensor } | CollectiveOp::ReduceLossParts { tensor } => {
            [Some(tensor), None]
        }
        CollectiveOp::TokenCounts
        | CollectiveOp::TokensPerExpert
        | CollectiveOp::RowCounts
        | CollectiveOp::GlobalRouting
        | CollectiveOp::TpTokenCounts
        | CollectiveOp::AllReduceTp { .. }
        | CollectiveOp::BroadcastShadowWeight { .. }
        | CollectiveOp::ReduceShadowGradient { .. }
        | CollectiveOp::AllGatherWeight { .. }
        | CollectiveOp::ReduceScatterGradient { .. } => [None, None],
    }
}
