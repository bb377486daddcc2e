//! Global routing: routing the tokens of all ranks together, where the scope of a layer's rules is
//! all ranks ([`TokenScope::World`]).
//!
//! Each rank gathers the router's inputs from all ranks, routes them with the kernels of its
//! dispatch part, and takes the rows of its own tokens from the result. Every order of placement
//! and every selection over tokens therefore equals that of one process, to the bit.

use super::layer::RankLayer;
use super::mesh_call::MeshCall;
use crate::call::{CallArgs, Input, Output, RngKey};
use crate::error::EngineError;
use crate::pass::Pass;
use bytemuck::cast_slice;
use moesaic_collectives::Call;
use moesaic_kernel::Size;
use moesaic_plan::TokenScope;
use moesaic_spec::{CapacityMode, LayerSpec, Select};
use moesaic_tensor::Tensor;
use std::ops::Range;
use std::sync::Arc;

/// The decision of global routing for this rank's tokens.
pub(super) struct Routing {
    ids: Vec<i32>,
    weights: Vec<f32>,
    locations: Vec<i32>,
    capacity: Option<i64>,
}

/// The layout of the rows of this rank's kept slots.
struct Layout {
    counts: Vec<i64>,
    offsets: Vec<i64>,
    slot_rows: Vec<i32>,
    row_slots: Vec<i32>,
    dropped: i64,
}

/// Returns whether a pass needs all tokens of a call to route one of them.
fn looks_at_all(spec: &LayerSpec, trains: bool) -> bool {
    let selects = match spec.router.select {
        Select::ExpertChoice(_) => true,
        Select::Sinkhorn(_) => trains,
        Select::TopK | Select::SparseMixer(_) | Select::PerGroup(_) => false,
    };
    selects || spec.capacity.mode != CapacityMode::Dropless
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
                return Err(EngineError::Input {
                    name: "x".to_string(),
                    problem: "is in device memory, but this mesh routes the tokens of all ranks \
                              together; give it in host memory, or make the layer on a mesh of \
                              TokenScope::Rank"
                        .to_string(),
                });
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
        let call = Call::new(&format!(
            "inputs of the router of {}",
            self.tokens.spec().name
        ));
        // A missing input must fail before the first exchange; afterwards the other ranks would
        // wait in it.
        let plan = self.tokens.plan();
        let ids = self.tokens.inputs(route).iter();
        let missing = ids
            .map(|id| &plan[*id].name)
            .find(|name| !input.tensors.contains_key(name.as_str()));
        if let Some(name) = missing {
            return Err(EngineError::Input {
                name: name.clone(),
                problem: "is missing".to_string(),
            });
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

impl Routing {
    /// Takes the decision for a range of tokens.
    fn of(output: &Output, tokens: &Range<usize>, top_k: usize) -> Routing {
        let slots = tokens.start * top_k..tokens.end * top_k;
        let whole = |name: &str| {
            let values = output.get(name).and_then(Tensor::to_vec::<i32>);
            values.unwrap_or_default()[slots.clone()].to_vec()
        };
        let weights = output.get("topk_weights").and_then(Tensor::to_vec::<f32>);
        let capacity = output.get("capacity").and_then(Tensor::to_vec::<i64>);
        Routing {
            ids: whole("topk_ids"),
            weights: weights.unwrap_or_default()[slots.clone()].to_vec(),
            locations: whole("locations"),
            capacity: capacity.and_then(|rows| rows.first().copied()),
        }
    }

    /// Returns the layout of rows by expert, and within an expert in the order of all ranks' rows.
    fn layout(&self, spec: &LayerSpec) -> Layout {
        let experts = spec.shape.experts;
        let mut counts = vec![0; spec.routed_experts()];
        let mut kept: Vec<(i32, i32, usize)> = Vec::new();
        let mut dropped = 0;
        for (slot, (&expert, &location)) in self.ids.iter().zip(&self.locations).enumerate() {
            let Ok(number) = usize::try_from(expert) else {
                continue; // masked
            };
            counts[number] += 1;
            match (number < experts, location >= 0) {
                (true, true) => kept.push((expert, location, slot)),
                (true, false) => dropped += 1,
                (false, _) => {} // without rows
            }
        }
        // By expert, then by location: rows of an expert keep the order in which routing placed
        // them.
        kept.sort_unstable();
        let mut slot_rows = vec![-1; self.ids.len()];
        for (row, (_, _, slot)) in kept.iter().enumerate() {
            slot_rows[*slot] = row as i32;
        }
        let before = |expert: usize| kept.partition_point(|(of, ..)| (*of as usize) < expert);
        Layout {
            offsets: (0..=experts).map(|expert| before(expert) as i64).collect(),
            row_slots: kept.iter().map(|(_, _, slot)| *slot as i32).collect(),
            counts,
            slot_rows,
            dropped,
        }
    }

    /// Returns the sums that weights are divided by where those of kept slots are renormalised.
    /// `weights` and `sums` come from this rank's own scan. That scan drops fewer slots than global
    /// routing, so every kept slot still has its weight.
    fn kept_sums(&self, spec: &LayerSpec, weights: &[f32], sums: &[f32]) -> Vec<f32> {
        let (top_k, experts) = (spec.shape.top_k, spec.shape.experts as i32);
        let scale = spec.router.scale as f32;
        let kept = |slot: usize| self.locations[slot] >= 0 || self.ids[slot] >= experts;
        let tokens = sums.iter().enumerate();
        let sum_of = |(token, &sum): (usize, &f32)| {
            let slots = (token * top_k..(token + 1) * top_k).filter(|slot| kept(*slot));
            let own: f32 = slots.map(|slot| weights[slot]).sum();
            // The scan divided the weights by its own sums; this undoes that division and the scale
            // before the sum over the slots that are left.
            if sum == 0.0 { 0.0 } else { own * sum / scale }
        };
        tokens.map(sum_of).collect()
    }
}

impl MeshCall<'_> {
    /// Replaces the result of this rank's scan by the decision of global routing.
    pub(super) fn apply_global_routing(&mut self) -> Result<(), EngineError> {
        let Some(routing) = self.routing.clone() else {
            return Ok(());
        };
        let spec = &self.plan.tokens.spec;
        if spec.capacity.renormalize_after_drop && self.tokens.named("kept_sums").is_some() {
            let weights = self.floats("topk_weights", routing.weights.len())?;
            let sums = self.floats("kept_sums", self.tokens.scalars().tokens())?;
            let sums = routing.kept_sums(spec, &weights, &sums);
            self.upload("kept_sums", cast_slice(&sums))?;
        }
        let layout = routing.layout(spec);
        self.upload("topk_ids", cast_slice(&routing.ids))?;
        self.upload("topk_weights", cast_slice(&routing.weights))?;
        self.upload("locations", cast_slice(&routing.locations))?;
        self.upload("counts", cast_slice(&layout.counts))?;
        self.upload("offsets", cast_slice(&layout.offsets))?;
        self.upload("slot_rows", cast_slice(&layout.slot_rows))?;
        self.upload("row_slots", cast_slice(&layout.row_slots))?;
        self.upload("overflow", &layout.dropped.to_le_bytes())?;
        match routing.capacity {
            Some(rows) => self.upload("capacity", &rows.to_le_bytes()),
            None => Ok(()),
        }
    }

    fn upload(&self, name: &str, bytes: &[u8]) -> Result<(), EngineError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.tokens.upload(name, bytes)
    }

    fn floats(&self, name: &str, count: usize) -> Result<Vec<f32>, EngineError> {
        let mut values = vec![0.0f32; count];
        if let (Some(buffer), true) = (self.tokens.named(name), count > 0) {
            let bytes = bytemuck::cast_slice_mut(&mut values);
            self.tokens.layer.device.download(buffer, 0, bytes)?;
        }
        Ok(values)
    }
}
