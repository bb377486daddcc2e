//! Gathered weights: all-gathers before a pass, and reduce-scatters of gradients to their owners.

use super::in_flight::Request;
use super::mesh_call::MeshCall;
use super::transfers::element;
use super::workspace_pool::clear;
use crate::error::EngineError;
use crate::memory::Buffers;
use moesaic_collectives::{Call, CommElement, Reduction, Slice, Transfer};
use moesaic_dist::OpGroup;
use moesaic_plan::{CollectiveOp, LayerPlan, RankStep, ShardRegion, TensorId, TensorRole};
use moesaic_target::{Buffer, RowCopy};
use std::sync::Arc;

/// A rank's index in its block, and the block's size.
struct BlockPosition {
    me: usize,
    size: usize,
}

/// The layout of a region's rows, in elements.
#[derive(Clone, Copy)]
struct Rows {
    first: usize,
    stride: usize,
}

impl MeshCall<'_> {
    /// Takes workspace for gathered weights of the expert part, if the call gathers any; with
    /// gradients for a backward pass.
    pub fn take_gathered_workspace(&mut self, gradients: bool) -> Result<(), EngineError> {
        if !self.plan.by().is_owner_only() {
            let plan = self.plan;
            let of = &plan.experts;
            self.parts.experts.borrowed = self.take_workspace(of, |id| {
                let is_gradient = gradients && of[id].role == TensorRole::WeightGradient;
                is_gradient || of.is_multiplied(id)
            })?;
        }
        Ok(())
    }

    /// Takes workspace for the wanted tensors of a part: weights, gradients, or both.
    pub fn take_workspace(
        &mut self,
        of: &LayerPlan,
        wanted: impl Fn(TensorId) -> bool,
    ) -> Result<Buffers, EngineError> {
        let mut borrowed = Buffers::default();
        for id in (0..of.tensors.len()).map(TensorId) {
            if wanted(id) {
                borrowed.push(id, self.take_buffer(of[id].bytes(0) as usize)?);
            }
        }
        Ok(borrowed)
    }

    /// Returns the workspace of all parts to the pool, because everything that uses it has been
    /// launched.
    pub fn return_workspace(&mut self) {
        for part in [&mut self.parts.experts]
            .into_iter()
            .chain(&mut self.parts.shadows)
        {
            let borrowed = std::mem::take(&mut part.borrowed);
            let buffers = borrowed.into_iter().map(|(_, buffer)| buffer);
            self.groups.workspaces.give(buffers);
        }
    }

    /// All-gathers a weight from the ranks of the block.
    pub fn gather_weight(
        &mut self,
        weight: TensorId,
        dim: Option<usize>,
        call: &Call,
    ) -> Result<(), EngineError> {
        let regions = self.plan.regions(weight, dim);
        let to = Arc::clone(self.parts.experts.buffer(weight));
        let own = Arc::clone(self.own(weight, &self.parts.owned.weights)?);
        let experts = self.plan.experts_here().len();
        // Rows of whole experts are received in place. A region of many small rows travels as one
        // message and is spread out by a copy.
        if regions.iter().any(|region| region.rows > experts) {
            self.gather_and_spread(weight, &regions, [&own, &to], call)
        } else {
            self.gather_rows(weight, &regions, [&own, &to], call)
        }
    }

    fn gather_rows(
        &mut self,
        weight: TensorId,
        regions: &[ShardRegion],
        [own, to]: [&Arc<Buffer>; 2],
        call: &Call,
    ) -> Result<(), EngineError> {
        let element = element(self.plan.experts[weight].dtype);
        let rows = |region: &ShardRegion, buffer: &Arc<Buffer>, peer: usize, at: Rows| {
            let row = |row: usize| {
                let slice = Slice::new(buffer, element, at.first + row * at.stride, region.row)?;
                Ok(Transfer { peer, slice })
            };
            (0..region.rows)
                .map(row)
                .collect::<Result<Vec<_>, EngineError>>()
        };
        let BlockPosition { me, size } = self.block_position();
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for peer in 0..size {
            for mine in regions.iter().filter(|region| region.owner == me) {
                sends.extend(rows(mine, own, peer, packed(mine, mine.own))?);
            }
        }
        for region in regions {
            receives.extend(rows(region, to, region.owner, spread(region))?);
        }
        let block = OpGroup::GatherGroup;
        let exchange = self.send(block, &sends, &receives, call)?;
        self.complete(exchange)
    }

    fn gather_and_spread(
        &mut self,
        weight: TensorId,
        regions: &[ShardRegion],
        [own, to]: [&Arc<Buffer>; 2],
        call: &Call,
    ) -> Result<(), EngineError> {
        let element = element(self.plan.experts[weight].dtype);
        let BlockPosition { me, size } = self.block_position();
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        let elements: usize = regions.iter().map(ShardRegion::elements).sum();
        let chunks = self.take_buffer(elements * element.size())?;
        let mut first = 0;
        for region in regions {
            let slice = |buffer, first| Slice::new(buffer, element, first, region.elements());
            let transfer = |peer, slice| Transfer { peer, slice };
            if region.owner == me {
                for peer in (0..size).filter(|peer| *peer != me) {
                    sends.push(transfer(peer, slice(own, region.own)?));
                }
            } else {
                receives.push(transfer(region.owner, slice(&chunks, first)?));
            }
            first += region.elements();
        }
        let block = OpGroup::GatherGroup;
        let exchange = self.send(block, &sends, &receives, call)?;
        self.complete(exchange)?;
        let mut first = 0;
        for region in regions {
            let (from, at) = if region.owner == me {
                (own, packed(region, region.own))
            } else {
                (&chunks, packed(region, first))
            };
            self.copy(region, element, [(from, at), (to, spread(region))])?;
            first += region.elements();
        }
        // The copies above are queued on the stream, so a later launch that gets this buffer runs
        // after them.
        self.groups.workspaces.give([chunks]);
        Ok(())
    }

    /// Reduce-scatters a gradient over the block: each owner gets the sum of its region, added up in
    /// f32.
    pub fn scatter_gradient(
        &mut self,
        gradient: TensorId,
        dim: Option<usize>,
        call: &Call,
    ) -> Result<(), EngineError> {
        let regions = self.plan.regions(gradient, dim);
        let element = element(self.plan.experts[gradient].dtype);
        let BlockPosition { me, size } = self.block_position();
        let mut counts = vec![0; size];
        for region in &regions {
            counts[region.owner] += region.elements();
        }
        let elements: usize = counts.iter().sum();
        let from = Arc::clone(self.parts.experts.buffer(gradient));
        let chunks = if in_order(&regions) {
            None
        } else {
            Some(self.take_buffer(elements * element.size())?)
        };
        let mut first = 0;
        for region in regions.iter().filter(|_| chunks.is_some()) {
            let to = chunks.as_ref().unwrap_or(&from);
            let places = [(&from, spread(region)), (to, packed(region, first))];
            self.copy(region, element, places)?;
            first += region.elements();
        }
        let input = chunks.as_ref().unwrap_or(&from);
        let input = Slice::new(input, element, 0, elements)?;
        let own = Arc::clone(self.own(gradient, self.parts.owned.gradient_buffers()?)?);
        let mine: Vec<&ShardRegion> = regions.iter().filter(|region| region.owner == me).collect();
        // A replica that another group owns leaves a gap between this rank's regions, but the sum
        // is contiguous; it has to be spread out afterwards.
        let sums = if without_gaps(&mine) {
            None
        } else {
            Some(self.take_buffer(counts[me] * element.size())?)
        };
        let output = sums.as_ref().unwrap_or(&own);
        let output = Slice::new(output, element, 0, counts[me])?;
        let block = self.group(OpGroup::GatherGroup);
        let sum = block.reduce_scatter_v(&input, &counts, &output, Reduction::Sum, call)?;
        self.complete(Request::of(sum, &input))?;
        let mut first = 0;
        for region in mine.iter().filter(|_| sums.is_some()) {
            let from = sums.as_ref().unwrap_or(&own);
            let places = [
                (from, packed(region, first)),
                (&own, packed(region, region.own)),
            ];
            self.copy(region, element, places)?;
            first += region.elements();
        }
        self.groups.workspaces.give(chunks.into_iter().chain(sums));
        Ok(())
    }

    /// Returns the gradients that are reduced to their owners, and the dimension that shards split.
    fn scattered(&self) -> impl Iterator<Item = (TensorId, Option<usize>)> {
        let exchanges = self.plan.backward.iter().filter_map(RankStep::exchange);
        let reduced =
            exchanges.filter(|exchange| exchange.op == CollectiveOp::ReduceScatterGradient);
        reduced.filter_map(|exchange| Some((exchange.tensors?.from, exchange.dim)))
    }

    /// Initialises gradients before a backward pass that reduces them over the block. With
    /// `accumulate`, this rank's own regions start with its gradient, so that the sum contains it
    /// once, and all others start at zero. Without it, only replicas that another group owns are
    /// cleared, because no sum overwrites them.
    pub fn begin_gradients(&mut self, accumulate: bool) -> Result<(), EngineError> {
        if self.plan.by().is_owner_only() {
            return Ok(());
        }
        let me = self.block_position().me;
        let device = &*self.parts.owned.device;
        if !accumulate && self.has_replicas_alone() {
            for (gradient, _) in self.scattered() {
                let own = self.own(gradient, self.parts.owned.gradient_buffers()?)?;
                clear(device, own, own.bytes())?;
            }
        }
        if !accumulate {
            return Ok(());
        }
        for (gradient, dim) in self.scattered() {
            let to = Arc::clone(self.parts.experts.buffer(gradient));
            let bytes = self.plan.experts[gradient].bytes(0) as usize;
            clear(device, &to, bytes)?;
            let own = self.own(gradient, self.parts.owned.gradient_buffers()?)?;
            let regions = self.plan.regions(gradient, dim);
            let element = element(self.plan.experts[gradient].dtype);
            for region in regions.iter().filter(|region| region.owner == me) {
                self.copy(
                    region,
                    element,
                    [(own, packed(region, region.own)), (&to, spread(region))],
                )?;
            }
        }
        Ok(())
    }

    /// Returns whether another group owns, and sums the gradients of, some of this rank's experts.
    fn has_replicas_alone(&self) -> bool {
        let (placement, ep) = (self.plan.placement(), self.plan.place.ep);
        let mut slots = 0..placement.count(ep);
        self.plan.adaptive_r == 0 && slots.any(|slot| !placement.owns(ep, slot))
    }

    /// Returns this rank's position in its block.
    fn block_position(&self) -> BlockPosition {
        let rank = self.mesh.rank();
        let block = self.plan.by().block(rank);
        BlockPosition {
            me: rank - block.start,
            size: block.len(),
        }
    }

    fn copy(
        &self,
        region: &ShardRegion,
        element: CommElement,
        [from, to]: [(&Arc<Buffer>, Rows); 2],
    ) -> Result<(), EngineError> {
        let size = element.size();
        let copy = RowCopy {
            from: from.0,
            from_offset: from.1.first * size,
            from_stride: from.1.stride * size,
            to: to.0,
            to_offset: to.1.first * size,
            to_stride: to.1.stride * size,
            rows: region.rows,
            row_bytes: region.row * size,
        };
        Ok(self.parts.owned.device.copy_rows(&copy)?)
    }
}

/// Returns the layout of a region stored without gaps.
fn packed(region: &ShardRegion, first: usize) -> Rows {
    let stride = region.row;
    Rows { first, stride }
}

/// Returns the layout of a region in the gathered tensor.
fn spread(region: &ShardRegion) -> Rows {
    let ShardRegion { first, stride, .. } = *region;
    Rows { first, stride }
}

/// Returns whether an owner's regions are contiguous from its first element on.
fn without_gaps(regions: &[&ShardRegion]) -> bool {
    let mut next = 0;
    regions.iter().all(|region| {
        let follows = region.own == next;
        next += region.elements();
        follows
    })
}

/// Returns whether regions are contiguous, in order, from the first element on.
fn in_order(regions: &[ShardRegion]) -> bool {
    let mut next = 0;
    regions.iter().all(|region| {
        let follows = region.rows == 1 && region.first == next;
        next += region.elements();
        follows
    })
}
