//! Global routing: routing the tokens of all ranks together, where the scope of a layer's rules is
//! all ranks ([`TokenScope::World`]).
//!
//! Each rank gathers the router's inputs from all ranks, routes them with the kernels of its
//! dispatch part, and takes the rows of its own tokens from the result. Every order of placement
//! and every selection over tokens therefore equals that of one process, to the bit.

use super::layer::RankLayer;
use super::routing::Routing;
use crate::call::{CallArgs, Input, RngKey, shape_for};
use crate::error::EngineError;
use crate::pass::Pass;
use crate::reason::InputReason;
use moesaic_collectives::Call;
use moesaic_kernel::Size;
use moesaic_plan::TokenScope;
use moesaic_spec::{CapacityMode, LayerSpec, Select};
use moesaic_tensor::Tensor;
use std::ops::Range;
use std::sync::Arc;

/// Returns whether a pass needs all tokens of a call to route one of them.
pub(crate) fn looks_at_all(spec: &LayerSpec, trains: bool) -> bool {
    let selects = match spec.router.select {
        Select::ExpertChoice(_) => true,
        Select::Sinkhorn(_) => trains,
        Select::TopK | Select::SparseMixer(_) | Select::PerGroup(_) => false,
    };
    selects || spec.router.blocks.is_some() || spec.capacity.mode != CapacityMode::Dropless
}

impl RankLayer {
    /// Routes the tokens of all ranks, if the scope asks for it and the call needs it. A call that
    /// asks for `locations` needs it, too, because these count the rows of other ranks.
    pub(super) fn global_routing(
        &self,
        pass: Pass,
        given: &CallArgs<'_>,
        rng_key: RngKey,
    ) -> Result<Option<Arc<Routing>>, EngineError> {
        if self.mesh.scope() == TokenScope::Rank {
            return Ok(None);
        }
        let needs = looks_at_all(self.tokens.spec(), pass.trains());
        let (input, names) = match given {
            CallArgs::Host(input, names) => (input, names),
            CallArgs::Raw(_) if needs => {
                return Err(EngineError::input("x", InputReason::RoutedTogether));
            }
            CallArgs::Raw(_) => return Ok(None),
        };
        if !needs && !names.contains(&"locations") {
            return Ok(None);
        }
        let route = if pass.trains() {
            Pass::RouteTrain
        } else {
            Pass::Route
        };
        let (all, own) = self.gather_router_inputs(route, input)?;
        // A dropless layer plans no `capacity`, and asking for it would be an error.
        let limited = self.tokens.id("capacity").map(|_| "capacity");
        let names = ["topk_ids", "topk_weights", "locations"];
        let names: Vec<&str> = names.into_iter().chain(limited).collect();
        let output = self.tokens.pass(route, &all, &names, rng_key)?;
        Ok(Some(Arc::new(Routing::of(
            &output,
            &own,
            self.tokens.spec().shape.top_k,
        ))))
    }

    /// Gathers the router's inputs of all ranks; also returns the range of this rank's tokens.
    fn gather_router_inputs(
        &self,
        route: Pass,
        input: &Input<'_>,
    ) -> Result<(Input<'static>, Range<usize>), EngineError> {
        let call = Call::new(&format!("inputs of the router of {}", self.label));
        // A missing input must fail before the first exchange; afterwards the other ranks would
        // wait in it.
        let plan = self.tokens.plan();
        let ids = self.tokens.inputs(route).iter();
        let missing = ids
            .map(|id| &plan[*id])
            .find(|tensor| !input.tensors.contains_key(tensor.name.as_str()));
        if let Some(tensor) = missing {
            let reason = InputReason::Missing {
                dtype: tensor.dtype,
                shape: shape_for(tensor, input.tokens),
            };
            return Err(EngineError::input(&tensor.name, reason));
        }
        let mut groups = self.mesh.groups();
        let tokens = groups.world.gather_numbers(&[input.tokens as u64], &call)?;
        let tokens: Vec<usize> = tokens.concat().into_iter().map(|n| n as usize).collect();
        let before: usize = tokens[..self.mesh.rank()].iter().sum();
        let mut all = Input {
            tokens: tokens.iter().sum(),
            // The capacity follows from the tokens of all ranks, as in one process.
            capacity_factor: input.capacity_factor,
            ..Input::default()
        };
        for id in self.tokens.inputs(route) {
            let plan = &plan[*id];
            let own = &input.tensors[&plan.name];
            let tensor = if plan.shape.first() == Some(&Size::Tokens) {
                let parts = groups.world.gather_bytes(&own.data, &call)?;
                let mut shape = own.shape.clone();
                if let Some(rows) = shape.first_mut() {
                    *rows = all.tokens;
                }
                Tensor {
                    dtype: own.dtype,
                    shape,
                    data: parts.concat().into(),
                }
            } else {
                own.clone().into_static()
            };
            all.insert(&plan.name, tensor);
        }
        Ok((all, before..before + input.tokens))
    }
}
