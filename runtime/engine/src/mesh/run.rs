//! A pass of one rank: launches of all parts, and exchanges group ranks.

use super::all_to_all::{Payload, RowSchedule};
use super::comm_cast::CastCall;
use super::groups::{GroupId, Groups, Mesh};
use super::in_flight::{InFlight, Request, Written};
use super::passes::{SHADOWED, SHARDED, Segment, chunks};
use super::plan_part::{Part, PartCall};
use super::raw::Beside;
use super::routing::Routing;
use super::rows::{OwnRows, RowRange, Rows};
use super::shadows::{IdleWeights, ShadowWeights};
use super::tp_peers::TpPeers;
use crate::error::EngineError;
use crate::launch::Bound;
use crate::layer::Layer;
use crate::trace::Recorder;
use bytemuck::cast_slice;
use moesaic_collectives::plan::{RowBytes, Schedule};
use moesaic_collectives::{Call, Element, Reduction, Slice, Transfer};
use moesaic_kernel::DType;
use moesaic_plan::{self as plan, Exchange, Parallel, RankCoords, RankPlan, ShadowModel};
use moesaic_plan::{CollectiveOp, TensorId};
use moesaic_spec::WeightSite;
use moesaic_target::Buffer;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

/// Rows of a tensor of a part that an exchange moves.
pub(super) type Moved = (plan::PlanPart, TensorId, Vec<RowRange>);

/// A call of one rank.
pub(super) struct Run<'l> {
    pub mesh: &'l Mesh,
    pub plan: &'l RankPlan,
    /// The name of the layer, in errors of exchanges.
    pub label: &'l str,
    /// How rows go to experts; those of a backward pass go as in forward.
    pub row_schedule: RowSchedule,
    pub groups: MutexGuard<'l, Groups>,
    pub tokens: PartCall<'l>,
    pub experts: PartCall<'l>,
    /// Those that the rank owns: where weights are gathered, not those of the expert part.
    pub owned: &'l Layer,
    /// Where experts may have shadows.
    pub shadows: Option<PartCall<'l>>,
    /// By what shadows are chosen.
    pub model: &'l ShadowModel,
    /// Where memory for their weights comes from in a pass that trains.
    pub idle_weights: Option<&'l Arc<IdleWeights>>,
    /// Weights of shadows that stay for backward.
    pub shadow_weights: Option<ShadowWeights>,
    /// Where shared experts are sliced.
    pub shared: Option<PartCall<'l>>,
    /// What routing the tokens of all ranks has decided, where the call needs that.
    pub routing: Option<Arc<Routing>>,
    /// Rows of this rank's tokens, once they are known.
    pub own: Arc<OwnRows>,
    pub rows: Option<Rows>,
    pub tp_peers: Option<TpPeers>,
    /// Tensors of the dispatch part that exchanges move.
    pub exchanged: &'l BTreeSet<TensorId>,
    /// What a raw call has of them.
    pub beside: Beside,
    /// Exchanges that are not waited for yet, in their order.
    pub in_flight: Vec<InFlight>,
    /// Where rows are packed for other nodes.
    pub cast: Option<CastCall<'l>>,
    /// Who is told of exchanges.
    pub recorder: Option<&'l dyn Recorder>,
}

impl Run<'_> {
    /// Runs the steps of a pass; `arrive` makes room on a part for the rows that come there.
    pub fn run(
        &mut self,
        segments: &[Segment],
        mut arrive: impl FnMut(&mut PartCall<'_>, usize) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let (chunks, cut) = chunks(segments);
        if chunks > 1 {
            self.groups.help();
        }
        for segment in segments {
            match segment {
                Segment::Launches(part, bound, chunk) => self.launch(*part, bound, *chunk)?,
                Segment::Exchange(exchange) => match exchange.op {
                    CollectiveOp::TokenCounts => {} // when the call began
                    CollectiveOp::TokensPerExpert => {
                        let recorded = self.begins(exchange);
                        let rows = self.choose_shadows()?;
                        self.ended(recorded, Instant::now());
                        arrive(self.shadows.as_mut().expect(SHADOWED), rows)?;
                        self.lay_out_shadows()?;
                    }
                    CollectiveOp::RowCounts => {
                        let recorded = self.begins(exchange);
                        let rows = self.count()?.in_chunks(chunks, cut);
                        self.ended(recorded, Instant::now());
                        arrive(&mut self.experts, rows.workspace())?;
                        self.lay_out(&rows)?;
                        self.rows = Some(rows);
                    }
                    CollectiveOp::TpTokenCounts => {
                        let recorded = self.begins(exchange);
                        let tp_peers = self.count_tp_peers(exchange)?;
                        self.ended(recorded, Instant::now());
                        let shared = self.shared.as_mut().expect(SHARDED);
                        arrive(shared, tp_peers.tokens())?;
                        self.tp_peers = Some(tp_peers);
                    }
                    _ => self.exchange(exchange)?,
                },
                Segment::Together(exchanges) => self.together(exchanges)?,
            }
        }
        self.finish_all()?;
        self.return_workspace();
        Ok(())
    }

    /// Launches steps of a part when what they read has come.
    fn launch(
        &mut self,
        part: plan::PlanPart,
        bound: &Bound,
        chunk: Option<plan::Chunk>,
    ) -> Result<(), EngineError> {
        if part == plan::PlanPart::Shadows && self.own.shadowed.is_empty() {
            return Ok(());
        }
        let Some(chunk) = chunk else {
            self.wait_for(|written| written.part == part)?;
            return self.part(part).run(bound);
        };
        let number = chunk.number;
        self.wait_for(|written| written.part == part && written.chunks.contains(&number))?;
        let rows = self.rows();
        let part = Part {
            chunk,
            first: rows.first_of(number),
            rows: rows.rows_of(number),
        };
        self.lay_out_chunk(rows, number)?;
        self.experts.run_part(bound, part)
    }

    pub(super) fn part(&self, part: plan::PlanPart) -> &PartCall<'_> {
        match part {
            plan::PlanPart::Dispatch => &self.tokens,
            plan::PlanPart::Experts => &self.experts,
            plan::PlanPart::Shadows => self.shadows.as_ref().expect(SHADOWED),
            plan::PlanPart::Shared => self.shared.as_ref().expect(SHARDED),
        }
    }

    pub(super) fn call(&self, name: &str) -> Call {
        Call::new(&format!("{} of {}", name, self.label))
    }

    /// Begins an exchange, and waits for it unless it is of a chunk.
    fn exchange(&mut self, exchange: &Exchange) -> Result<(), EngineError> {
        let written = self.written(exchange).into_iter().collect();
        self.wait_for_sums(exchange)?;
        let recorded = self.begins(exchange);
        match self.start(exchange)? {
            None => self.ended(recorded, Instant::now()),
            Some(request) => self.keep(exchange, request, written, recorded)?,
        }
        Ok(())
    }

    /// Rows of several tensors: where they go straight and as they are, a rank sends another
    /// all of them in one message.
    fn together(&mut self, exchanges: &[Exchange]) -> Result<(), EngineError> {
        let packed = |one: &Exchange| self.packed(&one.name).is_some();
        if self.rows().hop_counts.is_some() || exchanges.iter().any(packed) {
            return exchanges.iter().try_for_each(|one| self.exchange(one));
        }
        let recorded = self.begins(&exchanges[0]);
        let (mut sends, mut receives, mut written) = (Vec::new(), Vec::new(), Vec::new());
        for exchange in exchanges {
            self.wait_for_sums(exchange)?;
            let Some((_, sent, came)) = self.moved(exchange) else {
                continue;
            };
            sends.extend(self.transfers(sent.0, sent.1, &sent.2)?);
            receives.extend(self.transfers(came.0, came.1, &came.2)?);
            written.extend(self.written(exchange));
        }
        let names: Vec<&str> = exchanges.iter().map(|one| &*one.name).collect();
        let call = self.call_of(&names.join(" and "), exchanges[0].chunk);
        let request = self.send_by(None, &sends, &receives, &call)?;
        self.keep(&exchanges[0], request, written, recorded)
    }

    /// What goes back to the tokens is first summed over shards.
    fn wait_for_sums(&mut self, exchange: &Exchange) -> Result<(), EngineError> {
        let CollectiveOp::Combine { from, .. } = exchange.op else {
            return Ok(());
        };
        let sums = (plan::PlanPart::Experts, from);
        let chunks = self.rows().numbers(exchange.chunk);
        self.wait_for(|other| (other.part, other.tensor) == sums && other.shares(&chunks))
    }

    fn call_of(&self, name: &str, chunk: Option<plan::Chunk>) -> Call {
        match chunk {
            None => self.call(name),
            Some(chunk) => self.call(&format!("{name}, chunk {chunk},")).overlapped(),
        }
    }

    /// What the rows of tokens that an exchange moves are, those that this rank sends, and those
    /// that come.
    fn moved(&self, exchange: &Exchange) -> Option<(Payload, Moved, Moved)> {
        let (tokens, experts) = (plan::PlanPart::Dispatch, plan::PlanPart::Experts);
        match exchange.op {
            CollectiveOp::Dispatch { from, to } => {
                let rows = self.rows();
                let chunks = rows.numbers(exchange.chunk);
                let sent = (tokens, from, rows.sent(&chunks));
                let arrived = (experts, to, rows.arrived(&chunks));
                Some((self.load(from), sent, arrived))
            }
            CollectiveOp::Combine { from, to } => {
                let rows = self.rows();
                let chunks = rows.numbers(exchange.chunk);
                let answers = (experts, from, rows.answers(&chunks));
                let answered = (tokens, to, rows.answered(&chunks));
                Some((self.combine_payload(from), answers, answered))
            }
            _ => None,
        }
    }

    /// What an exchange of rows writes.
    fn written(&self, exchange: &Exchange) -> Option<Written> {
        let (part, tensor) = match exchange.op {
            CollectiveOp::Dispatch { to, .. } => (plan::PlanPart::Experts, to),
            CollectiveOp::AllReduceTp { tensor } => (plan::PlanPart::Experts, tensor),
            CollectiveOp::Combine { to, .. } => (plan::PlanPart::Dispatch, to),
            _ => return None,
        };
        Some(Written {
            part,
            tensor,
            chunks: self.rows().numbers(exchange.chunk),
        })
    }

    /// Begins an exchange; `None` if it is over then.
    fn start(&mut self, exchange: &Exchange) -> Result<Option<Request>, EngineError> {
        let call = self.call_of(&exchange.name, exchange.chunk);
        let request = match exchange.op {
            CollectiveOp::KeepShadowRows { .. }
            | CollectiveOp::ReturnShadowRows { .. }
            | CollectiveOp::BroadcastShadowWeight { .. }
            | CollectiveOp::ReduceShadowGradient { .. }
                if self.own.shadowed.is_empty() =>
            {
                return Ok(None); // no expert has one in this call
            }
            // Done when the call begins, or by [`Run::run`].
            CollectiveOp::TokenCounts
            | CollectiveOp::TokensPerExpert
            | CollectiveOp::RowCounts
            | CollectiveOp::TpTokenCounts => return Ok(None),
            CollectiveOp::Dispatch { .. } | CollectiveOp::Combine { .. } => {
                let Some((load, sent, came)) = self.moved(exchange) else {
                    return Ok(None);
                };
                let chunks = self.rows().numbers(exchange.chunk);
                self.send_rows(&exchange.name, (load, chunks), sent, came, &call)
            }
            CollectiveOp::AllReduceTp { tensor } => {
                let rows = self.rows();
                let span = rows.span(rows.numbers(exchange.chunk));
                let element = element(self.plan.experts[tensor].dtype);
                let width = self.plan.row_bytes(plan::PlanPart::Experts, tensor) / element.size();
                let buffer = self.experts.buffer(tensor);
                let data = Slice::new(buffer, element, span.start * width, span.len() * width)?;
                let slices = self.groups.group(GroupId::ExpertTp(self.plan.adaptive_r));
                let sum = slices.all_reduce(&data, &data, Reduction::Sum, &call)?;
                Ok(Request::of(sum, &data))
            }
            CollectiveOp::AllGatherTp { from, to } => {
                let tp_peers = self.tp_peers();
                let (sent, arrived) = (tp_peers.sent(), tp_peers.arrived());
                let sends = self.transfers(plan::PlanPart::Dispatch, from, &sent)?;
                let receives = self.transfers(plan::PlanPart::Shared, to, &arrived)?;
                self.send(GroupId::SharedTp, &sends, &receives, &call)
            }
            CollectiveOp::ReduceScatterTp { from, to } => self.sum_to_tokens(from, to, &call),
            CollectiveOp::BroadcastTp { from, to } => self.take_of_first(from, to, &call),
            CollectiveOp::AllReduceSum { from, to } => self.reduce(from, to, Reduction::Sum, &call),
            CollectiveOp::CountLiveTokens { ids, to } => {
                return self.count_live(ids, to, &call).map(|()| None);
            }
            CollectiveOp::GlobalRouting => return self.place_as_of_all().map(|()| None),
            CollectiveOp::ReduceLossParts { tensor } => {
                return self.sum_loss_parts(tensor, &call).map(|()| None);
            }
            CollectiveOp::AllReduceMax { tensor } => {
                self.reduce(tensor, tensor, Reduction::Max, &call)
            }
            CollectiveOp::AllGatherWeight { weight, cut } => {
                return self.gather_weight(weight, cut, &call).map(|()| None);
            }
            CollectiveOp::ReduceScatterGradient { gradient, cut } => {
                return self.scatter_gradient(gradient, cut, &call).map(|()| None);
            }
            CollectiveOp::AllGatherExperts { from, to } => self.gather(from, to, &call),
            CollectiveOp::KeepShadowRows { from, to } => return self.stay(from, to).map(|()| None),
            CollectiveOp::ReturnShadowRows { from, to } => {
                return self.leave(from, to).map(|()| None);
            }
            CollectiveOp::BroadcastShadowWeight { from, to } => {
                return self.send_weight(from, to, &call).map(|()| None);
            }
            CollectiveOp::ReduceShadowGradient { from, to } => {
                return self.sum_gradient(from, to, &call).map(|()| None);
            }
        };
        request.map(Some)
    }

    /// The mesh that rows travel in, and this rank's place there.
    pub(super) fn travels(&self) -> (Parallel, RankCoords) {
        let by = self.plan.by();
        (by.mesh(), by.place(self.mesh.rank()))
    }

    pub(super) fn rows(&self) -> &Rows {
        self.rows.as_ref().expect("rows are counted before they go")
    }

    fn tp_peers(&self) -> &TpPeers {
        let tp_peers = self.tp_peers.as_ref();
        tp_peers.expect("tokens are counted before their rows go")
    }

    pub fn send(
        &mut self,
        group: GroupId,
        sends: &[Transfer],
        receives: &[Transfer],
        call: &Call,
    ) -> Result<Request, EngineError> {
        let group = self.groups.group(group);
        let handle = group.exchange(sends, receives, call)?;
        Ok(Request::sending(handle, sends))
    }

    /// Rows of tokens, straight or by way of other ranks. Where that was chosen, those for other
    /// nodes are packed, and so all the way.
    fn send_rows(
        &mut self,
        name: &str,
        payload: (Payload, Range<usize>),
        sent: Moved,
        came: Moved,
        call: &Call,
    ) -> Result<Request, EngineError> {
        if let Some(packed) = self.packed(name) {
            return self.send_packed(packed, payload, sent, came, call);
        }
        let bytes = RowBytes::same(self.plan.row_bytes(sent.0, sent.1));
        let path = self
            .rows()
            .schedule(payload.0, &payload.1, (bytes, &|_, _| false));
        let sends = self.transfers(sent.0, sent.1, &sent.2)?;
        let receives = self.transfers(came.0, came.1, &came.2)?;
        self.send_by(path, &sends, &receives, call)
    }

    /// By a path, if there is one.
    pub(super) fn send_by(
        &mut self,
        path: Option<Box<dyn Schedule>>,
        sends: &[Transfer],
        receives: &[Transfer],
        call: &Call,
    ) -> Result<Request, EngineError> {
        let group = self.groups.group(GroupId::Ep(self.plan.adaptive_r));
        let handle = match path {
            None => group.exchange(sends, receives, call)?,
            Some(path) => group.exchange_with(sends, receives, &*path, call)?,
        };
        Ok(Request::sending(handle, sends))
    }

    /// Rows of a tensor as bytes: they are only moved.
    pub(super) fn transfers(
        &self,
        part: plan::PlanPart,
        tensor: TensorId,
        chunks: &[RowRange],
    ) -> Result<Vec<Transfer>, EngineError> {
        let bytes = self.plan.row_bytes(part, tensor);
        transfers(self.part(part).buffer(tensor), bytes, chunks)
    }

    /// Whether rows of a token are equal: `rows` are not where dispatch weights them.
    fn load(&self, from: TensorId) -> Payload {
        let weighted = self.plan.tokens.spec.router.weight_on == WeightSite::Input;
        match self.plan.tokens[from].name.as_str() {
            "dout" => Payload::Tokens,
            "rows" if !weighted => Payload::Tokens,
            _ => Payload::Rows,
        }
    }

    /// Whether what comes back is but added up. `combine` weights `out` where that was not
    /// done before, and gradients of weights that were on inputs read `drows`.
    fn combine_payload(&self, from: TensorId) -> Payload {
        let tensor = &self.plan.experts[from];
        let weight_on = self.plan.tokens.spec.router.weight_on;
        match tensor.name.as_str() {
            "out" if weight_on != WeightSite::Output => Payload::Addends(element(tensor.dtype)),
            "drows" if weight_on != WeightSite::Input => Payload::Addends(element(tensor.dtype)),
            _ => Payload::Answers,
        }
    }

    /// A tensor of all shards' tokens, whose sums over shards go to the tokens' ranks.
    fn sum_to_tokens(
        &mut self,
        from: TensorId,
        to: TensorId,
        call: &Call,
    ) -> Result<Request, EngineError> {
        let part = plan::PlanPart::Shared;
        let element = element(self.plan.part(part)[from].dtype);
        let width = self.plan.row_bytes(part, from) / element.size();
        let tp_peers = self.tp_peers();
        let (counts, own) = (tp_peers.elements(width), tp_peers.own_elements(width));
        let input = Slice::new(
            self.part(part).buffer(from),
            element,
            0,
            counts.iter().sum(),
        )?;
        let output = Slice::new(self.tokens.buffer(to), element, 0, own)?;
        let (slices, reduction) = (&mut self.groups.expert_tp, Reduction::Sum);
        let sum = slices.reduce_scatter_v(&input, &counts, &output, reduction, call)?;
        Ok(Request::of(sum, &input))
    }

    /// A weight of the first shard becomes that of the dispatch part of all.
    fn take_of_first(
        &mut self,
        from: TensorId,
        to: TensorId,
        call: &Call,
    ) -> Result<Request, EngineError> {
        let rows = self.plan.tokens[to].shape[0].eval(0) as usize;
        let chunk = |peer| RowRange {
            peer,
            first: 0,
            rows,
        };
        let sends: Vec<RowRange> = match self.mesh.place().tp {
            0 => (0..self.mesh.parallel().expert_tp).map(chunk).collect(),
            _ => Vec::new(),
        };
        let sends = self.transfers(plan::PlanPart::Shared, from, &sends)?;
        let receives = self.transfers(plan::PlanPart::Dispatch, to, &[chunk(0)])?;
        self.send(GroupId::SharedTp, &sends, &receives, call)
    }

    /// Tells the experts' kernels which row is which, and where rows of the first chunk lie.
    fn lay_out(&self, rows: &Rows) -> Result<(), EngineError> {
        if self.experts.named("row_slots").is_some() {
            let slots = rows.numbers_in_chunks();
            self.experts.tell("row_slots", cast_slice(&slots))?;
        }
        self.lay_out_chunk(rows, 0)
    }

    /// Tells the experts' kernels where rows of a chunk lie, in the order of the stream.
    fn lay_out_chunk(&self, rows: &Rows, chunk: usize) -> Result<(), EngineError> {
        let tiles = rows.row_tiles(chunk, self.plan.experts.tile_rows());
        let offsets = rows.expert_offsets(chunk);
        self.experts.tell("offsets", cast_slice(&offsets))?;
        self.experts.tell("row_tiles", cast_slice(&tiles))
    }

    /// Numbers of the dispatch part, over all ranks.
    fn reduce(
        &mut self,
        from: TensorId,
        to: TensorId,
        reduction: Reduction,
        call: &Call,
    ) -> Result<Request, EngineError> {
        let tensor = &self.plan.tokens[from];
        let count = tensor.elements(self.tokens.scalars().tokens() as u64) as usize;
        let element = element(tensor.dtype);
        let slice = |id| Slice::new(self.tokens.buffer(id), element, 0, count);
        let (input, output) = (slice(from)?, slice(to)?);
        let world = &mut self.groups.world;
        let sum = world.all_reduce(&input, &output, reduction, call)?;
        Ok(Request::of(sum, &input))
    }

    /// Weights of the experts of all groups; those of the first shards count.
    fn gather(
        &mut self,
        from: TensorId,
        to: TensorId,
        call: &Call,
    ) -> Result<Request, EngineError> {
        let (mesh, place) = self.travels();
        let placement = self.plan.row_placement();
        // What a group owns, in rows of its own and in rows of the whole.
        let runs = |ep: usize, of_whole: bool| {
            let (peer, experts) = (ep * mesh.expert_tp, placement.of(ep).into_owned());
            let owned = (0..experts.len()).filter(|&slot| placement.owns(ep, slot));
            let pairs: Vec<(usize, usize)> = owned.map(|slot| (slot, experts[slot])).collect();
            let next = |a: &(usize, usize), b: &(usize, usize)| (a.0 + 1, a.1 + 1) == *b;
            let chunks = pairs.chunk_by(next).map(|run| RowRange {
                peer,
                first: if of_whole { run[0].1 } else { run[0].0 },
                rows: run.len(),
            });
            chunks.collect::<Vec<RowRange>>()
        };
        let own = match place.tp {
            0 => runs(place.ep, false),
            _ => Vec::new(),
        };
        let sent = |peer| own.iter().map(move |chunk| RowRange { peer, ..*chunk });
        let sends: Vec<RowRange> = (0..mesh.group()).flat_map(sent).collect();
        let receives: Vec<RowRange> = (0..mesh.ep).flat_map(|ep| runs(ep, true)).collect();
        let sends = self.transfers(plan::PlanPart::Experts, from, &sends)?;
        let receives = self.transfers(plan::PlanPart::Dispatch, to, &receives)?;
        self.send(GroupId::Ep(self.plan.adaptive_r), &sends, &receives, call)
    }
}

/// Rows of so many bytes.
pub(super) fn transfers(
    buffer: &Arc<Buffer>,
    bytes: usize,
    chunks: &[RowRange],
) -> Result<Vec<Transfer>, EngineError> {
    let transfer = |chunk: &RowRange| {
        let (first, size) = (chunk.first * bytes, chunk.rows * bytes);
        Ok(Transfer {
            peer: chunk.peer,
            slice: Slice::new(buffer, Element::U8, first, size)?,
        })
    };
    chunks.iter().map(transfer).collect()
}

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
