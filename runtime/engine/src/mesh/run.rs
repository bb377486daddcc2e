//! A pass of one rank: launches of all sides, and exchanges between ranks.

use super::groups::{Groups, Mesh};
use super::ranks::Among;
use super::rows::{Neighbours, Piece, Rows};
use super::side::Side;
use crate::error::EngineError;
use crate::launch::Bound;
use bytemuck::cast_slice;
use moesaic_collectives::{Algorithm, Call, Element, Handle, Reduction, Slice, Transfer};
use moesaic_kernel::DType;
use moesaic_plan::{self as plan, Exchange, RankPlan, RankStep, TensorId, Way};
use moesaic_target::Buffer;
use std::sync::{Arc, MutexGuard};

/// Steps of a pass, launches bound.
pub(super) enum Segment {
    Launches(plan::Side, Bound),
    Exchange(Exchange),
}

/// The steps of a pass, launches of a side that follow each other together.
pub(super) fn segments(
    steps: &[RankStep],
    bind: impl Fn(plan::Side, &[usize]) -> Result<Bound, EngineError>,
) -> Result<Vec<Segment>, EngineError> {
    let side_of = |step: &RankStep| match step {
        RankStep::Launch { side, .. } => Some(*side),
        RankStep::Exchange(_) => None,
    };
    let together = |a: &RankStep, b: &RankStep| side_of(a).is_some() && side_of(a) == side_of(b);
    let parts = steps.chunk_by(together).map(|part| match &part[0] {
        RankStep::Exchange(exchange) => Ok(Segment::Exchange(exchange.clone())),
        RankStep::Launch { side, .. } => {
            let numbers = part.iter().filter_map(|step| match step {
                RankStep::Launch { step, .. } => Some(*step),
                RankStep::Exchange(_) => None,
            });
            let bound = bind(*side, &numbers.collect::<Vec<usize>>())?;
            Ok(Segment::Launches(*side, bound))
        }
    });
    parts.collect()
}

/// What every rank has in a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Census {
    /// Tokens of ranks before this one.
    pub before: usize,
    /// Of the rank with the most.
    pub most: usize,
}

/// A call of one rank.
pub(super) struct Run<'l> {
    pub mesh: &'l Mesh,
    pub plan: &'l RankPlan,
    /// The name of the layer, in errors of exchanges.
    pub label: &'l str,
    pub groups: MutexGuard<'l, Groups>,
    pub tokens: Side<'l>,
    pub experts: Side<'l>,
    /// Where shared experts are sliced.
    pub shared: Option<Side<'l>>,
    pub rows: Option<Rows>,
    pub neighbours: Option<Neighbours>,
    /// Exchanges that the device's stream has, and that may still fail.
    pub under_way: Vec<Handle>,
}

impl Run<'_> {
    /// What every rank has, if a pass asks.
    pub fn census(
        &mut self,
        segments: &[Segment],
        tokens: usize,
    ) -> Result<Option<Census>, EngineError> {
        let asks = |segment: &Segment| {
            matches!(
                segment,
                Segment::Exchange(Exchange {
                    way: Way::Tokens,
                    ..
                })
            )
        };
        if !segments.iter().any(asks) {
            return Ok(None);
        }
        let all = self.each_has(tokens, Among::World, &self.call("tokens"))?;
        Ok(Some(Census {
            before: all[..self.mesh.rank()].iter().sum(),
            most: all.iter().copied().max().unwrap_or(0),
        }))
    }

    /// A number of every rank of a group.
    fn each_has(
        &mut self,
        own: usize,
        among: Among,
        call: &Call,
    ) -> Result<Vec<usize>, EngineError> {
        let group = self.groups.among(among);
        let all = group.gather_bytes(&(own as u64).to_le_bytes(), call)?;
        let number = |bytes: &Vec<u8>| {
            let bytes = bytes.as_slice().try_into().unwrap_or_default();
            u64::from_le_bytes(bytes) as usize
        };
        Ok(all.iter().map(number).collect())
    }

    /// Runs the steps of a pass; `arrive` makes room on a side for the rows that come there.
    pub fn run(
        &mut self,
        segments: &[Segment],
        mut arrive: impl FnMut(&mut Side<'_>, usize) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        for segment in segments {
            match segment {
                Segment::Launches(side, bound) => self.side(*side).run(bound)?,
                Segment::Exchange(exchange) => match exchange.way {
                    Way::Counts => {
                        let rows = self.count()?;
                        arrive(&mut self.experts, rows.arriving())?;
                        self.lay_out(&rows)?;
                        self.rows = Some(rows);
                    }
                    Way::Neighbours => {
                        let neighbours = self.count_neighbours(exchange)?;
                        let shared = self.shared.as_mut().expect(SLICED);
                        arrive(shared, neighbours.tokens())?;
                        self.neighbours = Some(neighbours);
                    }
                    _ => self.exchange(exchange)?,
                },
            }
        }
        let mut exchanges = self.under_way.drain(..);
        Ok(exchanges.try_for_each(Handle::wait)?)
    }

    /// Until launches that follow see the result. What is in the stream's order is waited
    /// for when the pass has been launched.
    fn finish(&mut self, exchange: Handle) -> Result<(), EngineError> {
        match exchange.is_in_stream() {
            true => self.under_way.push(exchange),
            false => exchange.wait()?,
        }
        Ok(())
    }

    fn side(&self, side: plan::Side) -> &Side<'_> {
        match side {
            plan::Side::Tokens => &self.tokens,
            plan::Side::Experts => &self.experts,
            plan::Side::Shared => self.shared.as_ref().expect(SLICED),
        }
    }

    fn call(&self, name: &str) -> Call {
        Call::new(&format!("{} of {}", name, self.label))
    }

    fn exchange(&mut self, exchange: &Exchange) -> Result<(), EngineError> {
        let call = self.call(&exchange.name);
        match exchange.way {
            // Done when the call begins, or before rows go.
            Way::Tokens | Way::Counts | Way::Neighbours => Ok(()),
            Way::ToExperts { from, to } => {
                let rows = self.rows();
                let (sent, arrived) = (rows.sent(), rows.arrived());
                let sends = self.transfers(plan::Side::Tokens, from, &sent)?;
                let receives = self.transfers(plan::Side::Experts, to, &arrived)?;
                self.send(Among::Group, &sends, &receives, &call)
            }
            Way::ToTokens { from, to } => {
                let rows = self.rows();
                let (answers, answered) = (rows.answers(), rows.answered());
                let sends = self.transfers(plan::Side::Experts, from, &answers)?;
                let receives = self.transfers(plan::Side::Tokens, to, &answered)?;
                self.send(Among::Group, &sends, &receives, &call)
            }
            Way::OverShards { tensor } => {
                let rows = self.rows().arriving();
                let element = element(self.plan.experts[tensor].dtype);
                let width = self.plan.row_bytes(plan::Side::Experts, tensor) / element.size();
                let buffer = self.experts.buffer(tensor);
                let data = Slice::new(buffer, element, 0, rows * width)?;
                let slices = &mut self.groups.slices;
                let sum = slices.all_reduce(&data, &data, Reduction::Sum, &call)?;
                self.finish(sum)
            }
            Way::ToSlices { from, to } => {
                let neighbours = self.neighbours();
                let (sent, arrived) = (neighbours.sent(), neighbours.arrived());
                let sends = self.transfers(plan::Side::Tokens, from, &sent)?;
                let receives = self.transfers(plan::Side::Shared, to, &arrived)?;
                self.send(Among::Slices, &sends, &receives, &call)
            }
            Way::FromSlices { from, to } => self.sum_to_tokens(from, to, &call),
            Way::OfFirst { from, to } => self.take_of_first(from, to, &call),
            Way::Sum { from, to } => self.reduce(from, to, Reduction::Sum, &call),
            Way::Live { ids, to } => self.count_live(ids, to, &call),
            Way::Most { tensor } => self.reduce(tensor, tensor, Reduction::Max, &call),
            Way::Gather { from, to } => self.gather(from, to, &call),
        }
    }

    fn rows(&self) -> &Rows {
        self.rows.as_ref().expect("rows are counted before they go")
    }

    fn neighbours(&self) -> &Neighbours {
        let neighbours = self.neighbours.as_ref();
        neighbours.expect("tokens are counted before their rows go")
    }

    fn send(
        &mut self,
        among: Among,
        sends: &[Transfer],
        receives: &[Transfer],
        call: &Call,
    ) -> Result<(), EngineError> {
        let group = self.groups.among(among);
        let exchange = group.exchange(sends, receives, call)?;
        self.finish(exchange)
    }

    /// Rows of a tensor as bytes: they are only moved.
    fn transfers(
        &self,
        side: plan::Side,
        tensor: TensorId,
        pieces: &[Piece],
    ) -> Result<Vec<Transfer>, EngineError> {
        let bytes = self.plan.row_bytes(side, tensor);
        let buffer = self.side(side).buffer(tensor);
        let transfer = |piece: &Piece| {
            let (first, size) = (piece.first * bytes, piece.rows * bytes);
            Ok(Transfer {
                peer: piece.peer,
                slice: Slice::new(buffer, Element::U8, first, size)?,
            })
        };
        pieces.iter().map(transfer).collect()
    }

    /// Everybody learns how many rows come from where.
    fn count(&mut self) -> Result<Rows, EngineError> {
        let (mesh, place) = (self.mesh.parallel(), self.mesh.place());
        let (placement, experts) = (self.plan.placement(), self.plan.tokens.spec.shape.experts);
        let mut offsets = vec![0i64; experts + 1];
        let device = &*self.tokens.layer.device;
        let from = self.tokens.named("offsets").expect("a scan has offsets");
        device.download(from, 0, bytemuck::cast_slice_mut(&mut offsets))?;
        let offsets: Vec<usize> = offsets.into_iter().map(|row| row as usize).collect();
        let (counts, sizes) = Rows::told((mesh, place), &placement, &offsets);
        let own = placement.count(place.ep);
        let mut told = vec![0i64; own * mesh.group()];
        let buffer = |count: usize| Ok::<_, EngineError>(Arc::new(device.alloc(8 * count.max(8))?));
        let (input, output) = (buffer(counts.len())?, buffer(told.len())?);
        device.upload(cast_slice(&counts), &input, 0)?;
        let slice = |buffer: &Arc<Buffer>, count| Slice::new(buffer, Element::I64, 0, count);
        let (input, output) = (slice(&input, counts.len())?, slice(&output, told.len())?);
        let (receives, algorithm) = (vec![own; mesh.group()], Algorithm::Direct);
        let call = self.call("counts");
        let rows = &mut self.groups.rows;
        rows.all_to_all_by_counts(&input, &sizes, &output, &receives, algorithm, &call)?
            .wait()?;
        device.download(output.buffer(), 0, bytemuck::cast_slice_mut(&mut told))?;
        Ok(Rows::new((mesh, place), placement, offsets, &told))
    }

    /// Ranks with slices of the same experts learn how many tokens each has.
    fn count_neighbours(&mut self, exchange: &Exchange) -> Result<Neighbours, EngineError> {
        let (tokens, call) = (self.tokens.scalars().tokens(), self.call(&exchange.name));
        let counts = self.each_has(tokens, Among::Slices, &call)?;
        Ok(Neighbours::new(counts, self.mesh.place().shard))
    }

    /// A tensor of all slices' tokens, whose sums over slices go to the tokens' ranks.
    fn sum_to_tokens(
        &mut self,
        from: TensorId,
        to: TensorId,
        call: &Call,
    ) -> Result<(), EngineError> {
        let side = plan::Side::Shared;
        let element = element(self.plan.side(side)[from].dtype);
        let width = self.plan.row_bytes(side, from) / element.size();
        let neighbours = self.neighbours();
        let (counts, own) = (neighbours.elements(width), neighbours.own_elements(width));
        let input = Slice::new(
            self.side(side).buffer(from),
            element,
            0,
            counts.iter().sum(),
        )?;
        let output = Slice::new(self.tokens.buffer(to), element, 0, own)?;
        let (slices, reduction) = (&mut self.groups.slices, Reduction::Sum);
        let sum = slices.reduce_scatter_by_counts(&input, &counts, &output, reduction, call)?;
        self.finish(sum)
    }

    /// A weight of the first slice becomes that of the tokens' side of all.
    fn take_of_first(
        &mut self,
        from: TensorId,
        to: TensorId,
        call: &Call,
    ) -> Result<(), EngineError> {
        let rows = self.plan.tokens[to].shape[0].eval(0) as usize;
        let piece = |peer| Piece {
            peer,
            first: 0,
            rows,
        };
        let sends: Vec<Piece> = match self.mesh.place().shard {
            0 => (0..self.mesh.parallel().shards).map(piece).collect(),
            _ => Vec::new(),
        };
        let sends = self.transfers(plan::Side::Shared, from, &sends)?;
        let receives = self.transfers(plan::Side::Tokens, to, &[piece(0)])?;
        self.send(Among::Slices, &sends, &receives, call)
    }

    /// Tells the experts' kernels where rows lie.
    fn lay_out(&self, rows: &Rows) -> Result<(), EngineError> {
        let device = &*self.experts.layer.device;
        let upload = |name: &str, bytes: &[u8]| match self.experts.named(name) {
            Some(buffer) => device.upload(bytes, buffer, 0),
            None => Ok(()),
        };
        upload("offsets", cast_slice(&rows.expert_offsets()))?;
        upload(
            "row_tiles",
            cast_slice(&rows.row_tiles(self.plan.tile_rows)),
        )?;
        if self.experts.named("row_slots").is_some() {
            let slots: Vec<i32> = (0..rows.arriving() as i32).collect();
            upload("row_slots", cast_slice(&slots))?;
        }
        Ok(())
    }

    /// The tokens of all ranks with an expert.
    fn count_live(&mut self, ids: TensorId, to: TensorId, call: &Call) -> Result<(), EngineError> {
        let device = &*self.tokens.layer.device;
        let (tokens, top_k) = (
            self.tokens.scalars().tokens(),
            self.plan.tokens.spec.shape.top_k,
        );
        let mut choices = vec![0i32; tokens * top_k];
        let bytes = bytemuck::cast_slice_mut(&mut choices);
        device.download(self.tokens.buffer(ids), 0, bytes)?;
        let has_one = |ids: &&[i32]| ids.iter().any(|id| *id >= 0);
        let own = choices.chunks(top_k).filter(has_one).count();
        let all: usize = self.each_has(own, Among::World, call)?.iter().sum();
        device.upload(&(all as i64).to_le_bytes(), self.tokens.buffer(to), 0)?;
        Ok(())
    }

    /// Numbers of the tokens' side, over all ranks.
    fn reduce(
        &mut self,
        from: TensorId,
        to: TensorId,
        reduction: Reduction,
        call: &Call,
    ) -> Result<(), EngineError> {
        let tensor = &self.plan.tokens[from];
        let count = tensor.elements(self.tokens.scalars().tokens() as u64) as usize;
        let element = element(tensor.dtype);
        let slice = |id| Slice::new(self.tokens.buffer(id), element, 0, count);
        let (input, output) = (slice(from)?, slice(to)?);
        let world = &mut self.groups.world;
        let sum = world.all_reduce(&input, &output, reduction, call)?;
        self.finish(sum)
    }

    /// Weights of the experts of all groups; those of the first slices count.
    fn gather(&mut self, from: TensorId, to: TensorId, call: &Call) -> Result<(), EngineError> {
        let (mesh, place) = (self.mesh.parallel(), self.mesh.place());
        let placement = self.plan.placement();
        // What a group owns, in rows of its own and in rows of the whole.
        let runs = |ep: usize, of_whole: bool| {
            let (peer, experts) = (ep * mesh.shards, placement.of(ep).into_owned());
            let owned = (0..experts.len()).filter(|&slot| placement.owns(ep, slot));
            let pairs: Vec<(usize, usize)> = owned.map(|slot| (slot, experts[slot])).collect();
            let next = |a: &(usize, usize), b: &(usize, usize)| (a.0 + 1, a.1 + 1) == *b;
            let pieces = pairs.chunk_by(next).map(|run| Piece {
                peer,
                first: if of_whole { run[0].1 } else { run[0].0 },
                rows: run.len(),
            });
            pieces.collect::<Vec<Piece>>()
        };
        let own = match place.shard {
            0 => runs(place.ep, false),
            _ => Vec::new(),
        };
        let sent = |peer| own.iter().map(move |piece| Piece { peer, ..*piece });
        let sends: Vec<Piece> = (0..mesh.group()).flat_map(sent).collect();
        let receives: Vec<Piece> = (0..mesh.ep).flat_map(|ep| runs(ep, true)).collect();
        let sends = self.transfers(plan::Side::Experts, from, &sends)?;
        let receives = self.transfers(plan::Side::Tokens, to, &receives)?;
        self.send(Among::Group, &sends, &receives, call)
    }
}

/// Why there is a side of shared experts.
pub(super) const SLICED: &str = "steps of shared experts are of ranks with slices of them";

/// As collectives call it.
pub(super) fn element(dtype: DType) -> Element {
    match dtype {
        DType::F32 => Element::F32,
        DType::F16 => Element::F16,
        DType::Bf16 => Element::Bf16,
        DType::I32 => Element::I32,
        DType::I64 => Element::I64,
    }
}
