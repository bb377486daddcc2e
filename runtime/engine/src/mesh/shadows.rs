//! Shadows: experts that every group of ranks holds for one call, as in FasterMoE.
//!
//! Rows of a shadowed expert stay on their rank, its weights come from its owner, and its gradients
//! are summed at the owner. The choice follows from the row counts of all ranks; every rank has the
//! same counts, so all choose alike.

use super::in_flight::Request;
use super::mesh_call::{Bytes, MeshCall};
use super::passes::SHADOWED;
use super::plan_part::PartCall;
use super::rows::row_tiles;
use super::shadow_weights::ShadowWeights;
use super::transfers::element;
use super::workspace_pool::clear;
use crate::error::EngineError;
use crate::memory::Buffers;
use bytemuck::cast_slice;
use moesaic_collectives::{Call, CommElement, Reduction, Slice};
use moesaic_dist::{CollectiveOp, OpGroup};
use moesaic_plan::{
    self as plan, FromTo, LayerPlan, RankStep, ShadowModel, TensorId, TensorRole, shadows,
};
use std::sync::Arc;

impl MeshCall<'_> {
    /// Chooses the shadowed experts and reserves memory for their weights; returns how many rows of
    /// this rank stay.
    pub fn choose_shadows(&mut self) -> Result<usize, EngineError> {
        self.count_own()?;
        let experts = self.plan.tokens.spec.shape.experts;
        let own = (0..experts).map(|expert| self.counts.own.of(expert) as u64);
        let (own, call) = (own.collect::<Vec<_>>(), self.call("tokens per expert"));
        let counts = self.gather_counts_of(&own, OpGroup::Ep, &call)?;
        let placement = self.plan.placement();
        // The shadow part was planned for so many experts; its tensors have no room for more.
        let model = ShadowModel {
            most: self
                .weights
                .model
                .most
                .min(self.shadow_plan().spec.shape.experts),
            ..*self.weights.model
        };
        let mut chosen = shadows(&model, &placement, self.plan.mesh.expert_tp, &counts);
        // Ordered by owner, because a reduce-scatter gives each rank one contiguous part of the
        // gradients.
        chosen.sort_by_key(|&expert| (placement.owner(expert), expert));
        Arc::make_mut(&mut self.counts.own).shadowed = chosen;
        self.reserve_shadows()?;
        let stay = self
            .counts
            .own
            .shadowed
            .iter()
            .map(|&expert| self.counts.own.of(expert));
        Ok(stay.sum())
    }

    /// Reserves memory for weights of shadows, if the call has any: from the pool, or memory of
    /// their own where they stay for backward.
    fn reserve_shadows(&mut self) -> Result<(), EngineError> {
        let plan = self.plan;
        let (Some(of), false) = (&plan.shadows, self.counts.own.shadowed.is_empty()) else {
            return Ok(());
        };
        // Weights that stay for backward must outlive the call, so they cannot come from the
        // workspace pool, which the next call uses.
        let Some(idle) = self
            .weights
            .idle_weights
            .filter(|_| plan.keeps_shadow_weights())
        else {
            let borrowed = self.take_workspace(of, |id| of.is_multiplied(id))?;
            self.parts.shadows.as_mut().expect(SHADOWED).borrowed = borrowed;
            return Ok(());
        };
        let weights = ShadowWeights::take(of, idle, &*self.parts.owned.device)?;
        self.parts.shadows.as_mut().expect(SHADOWED).kept_weights = weights.buffers.clone();
        self.weights.shadow_weights = Some(weights);
        Ok(())
    }

    /// Reserves memory of shadows for a backward pass: the weights that stayed, and workspace for
    /// gradients and for weights that did not stay.
    pub fn reserve_shadows_backward(
        &mut self,
        stayed: Option<&ShadowWeights>,
    ) -> Result<(), EngineError> {
        let plan = self.plan;
        let (Some(of), false) = (&plan.shadows, self.counts.own.shadowed.is_empty()) else {
            return Ok(());
        };
        let borrowed = self.take_workspace(of, |id| {
            let is_weight = stayed.is_none() && of.is_multiplied(id);
            is_weight || of[id].role == TensorRole::WeightGradient
        })?;
        let part = self.parts.shadows.as_mut().expect(SHADOWED);
        part.borrowed = borrowed;
        part.kept_weights = stayed.map_or_else(Buffers::default, |weights| weights.buffers.clone());
        Ok(())
    }

    /// Uploads the layout of each shadow's rows.
    pub fn upload_shadow_layout(&self) -> Result<(), EngineError> {
        let (part, plan) = (self.shadow_part(), self.shadow_plan());
        let offsets = self.counts.own.shadow_offsets(plan.spec.shape.experts);
        let rows: Vec<i32> = (0..offsets[offsets.len() - 1] as i32).collect();
        part.upload("offsets", cast_slice(&offsets))?;
        part.upload(
            "row_tiles",
            cast_slice(&row_tiles(&offsets, plan.tile_rows())),
        )?;
        part.upload("row_slots", cast_slice(&rows))
    }

    /// Copies rows of the dispatch part to the shadow part.
    pub fn keep_shadow_rows(&self, from: TensorId, to: TensorId) -> Result<(), EngineError> {
        let row = self.plan.row_bytes(plan::PlanPart::Dispatch, from);
        let (from, to) = (
            self.parts.tokens.buffer(from),
            self.shadow_part().buffer(to),
        );
        self.rows_of_shadows().try_for_each(|[here, there, rows]| {
            self.copy_bytes(
                Bytes::at(from, here * row),
                Bytes::at(to, there * row),
                rows * row,
            )
        })
    }

    /// Copies rows of the shadow part back to the dispatch part.
    pub fn return_shadow_rows(&self, from: TensorId, to: TensorId) -> Result<(), EngineError> {
        let row = self.plan.row_bytes(plan::PlanPart::Shadows, from);
        let (from, to) = (
            self.shadow_part().buffer(from),
            self.parts.tokens.buffer(to),
        );
        self.rows_of_shadows().try_for_each(|[here, there, rows]| {
            self.copy_bytes(
                Bytes::at(from, there * row),
                Bytes::at(to, here * row),
                rows * row,
            )
        })
    }

    /// Returns for each shadow the first row on the dispatch part, the first row on the shadow
    /// part, and the number of rows.
    fn rows_of_shadows(&self) -> impl Iterator<Item = [usize; 3]> {
        let own = &self.counts.own;
        own.shadowed.iter().scan(0, |next, &expert| {
            let (there, rows) = (*next, own.of(expert));
            *next += rows;
            Some([own.offsets[expert], there, rows])
        })
    }

    /// Broadcasts a weight of each shadowed expert from its owner to all groups.
    pub fn broadcast_shadow_weight(
        &mut self,
        from: TensorId,
        to: TensorId,
        call: &Call,
    ) -> Result<(), EngineError> {
        let to = Arc::clone(self.shadow_part().buffer(to));
        let own = Arc::clone(self.own(from, &self.parts.owned.weights)?);
        let (dtype, elements) = self.of_expert(from);
        let bytes = elements * dtype.size();
        let owners = self.owners();
        for (number, slot) in self.mine(&owners) {
            self.copy_bytes(
                Bytes::at(&own, slot * bytes),
                Bytes::at(&to, number * bytes),
                bytes,
            )?;
        }
        for (number, [owner, _]) in owners.into_iter().enumerate() {
            let data = Slice::new(&to, dtype, number * elements, elements)?;
            let group = self.group(OpGroup::Ep);
            let sent = group.broadcast(&data, owner, call)?;
            // Broadcasts run in the same order on all ranks because every rank has the same list of
            // shadows.
            self.complete(Request::of(sent, &data))?;
        }
        Ok(())
    }

    /// Initialises gradients of shadows before a backward pass that accumulates: the owner's
    /// gradient goes in once, so that the sum contains it.
    pub fn begin_shadow_gradients(&mut self, accumulate: bool) -> Result<(), EngineError> {
        if !accumulate || self.counts.own.shadowed.is_empty() {
            return Ok(());
        }
        for FromTo { from, to } in shadow_gradients(&self.plan.backward) {
            let gradient = self.shadow_part().buffer(from);
            let own = self.own(to, self.parts.owned.gradient_buffers()?)?;
            let (element, elements) = self.of_expert(to);
            let bytes = elements * element.size();
            let owners = self.owners();
            clear(&*self.parts.owned.device, gradient, owners.len() * bytes)?;
            for (number, slot) in self.mine(&owners) {
                self.copy_bytes(
                    Bytes::at(own, slot * bytes),
                    Bytes::at(gradient, number * bytes),
                    bytes,
                )?;
            }
        }
        Ok(())
    }

    /// Reduces gradients of shadows over the groups; the owner of each gets the sum.
    pub fn reduce_shadow_gradient(
        &mut self,
        from: TensorId,
        to: TensorId,
        call: &Call,
    ) -> Result<(), EngineError> {
        let ((element, elements), owners) = (self.of_expert(to), self.owners());
        let me = self.plan.place.ep;
        let mut counts = vec![0; self.plan.mesh.ep];
        owners
            .iter()
            .for_each(|[owner, _]| counts[*owner] += elements);
        let sums = self.take_buffer(counts[me] * element.size())?;
        let from = Arc::clone(self.shadow_part().buffer(from));
        let input = Slice::new(&from, element, 0, counts.iter().sum())?;
        let output = Slice::new(&sums, element, 0, counts[me])?;
        let group = self.group(OpGroup::Ep);
        let sum = group.reduce_scatter_v(&input, &counts, &output, Reduction::Sum, call)?;
        self.complete(Request::of(sum, &input))?;
        let own = self.own(to, self.parts.owned.gradient_buffers()?)?;
        let bytes = elements * element.size();
        for (number, (_, slot)) in self.mine(&owners).enumerate() {
            self.copy_bytes(
                Bytes::at(&sums, number * bytes),
                Bytes::at(own, slot * bytes),
                bytes,
            )?;
        }
        self.groups.workspaces.give([sums]);
        Ok(())
    }

    /// Returns for each shadow the group that owns its expert and the expert's slot there.
    fn owners(&self) -> Vec<[usize; 2]> {
        let placement = self.plan.placement();
        let of = |&expert: &usize| {
            let owner = placement.owner(expert);
            let slot = placement.slot(owner, expert);
            [owner, slot.expect("an owner has its expert")]
        };
        self.counts.own.shadowed.iter().map(of).collect()
    }

    /// Returns the shadows of this rank's experts: the index of the shadow and the expert's slot.
    fn mine(&self, owners: &[[usize; 2]]) -> impl Iterator<Item = (usize, usize)> {
        let me = self.plan.place.ep;
        let all = owners.iter().enumerate();
        all.filter_map(move |(number, [owner, slot])| (*owner == me).then_some((number, *slot)))
    }

    /// Returns the element type of a tensor of the expert part and the elements of one expert.
    fn of_expert(&self, tensor: TensorId) -> (CommElement, usize) {
        let tensor = &self.plan.experts[tensor];
        let each = tensor.shape[1..].iter().map(|size| size.eval(0) as usize);
        (element(tensor.dtype), each.product())
    }

    fn shadow_part(&self) -> &PartCall<'_> {
        self.parts.shadows.as_ref().expect(SHADOWED)
    }

    fn shadow_plan(&self) -> &LayerPlan {
        self.plan.shadows.as_ref().expect(SHADOWED)
    }
}

/// Returns the gradients that a pass reduces, and the tensors that receive the sums.
fn shadow_gradients(steps: &[RankStep]) -> impl Iterator<Item = FromTo> {
    let exchanges = steps.iter().filter_map(RankStep::exchange);
    let reduced = exchanges.filter(|exchange| exchange.op == CollectiveOp::ReduceShadowGradient);
    reduced.filter_map(|exchange| exchange.tensors)
}
