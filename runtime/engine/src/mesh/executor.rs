//! The executor of a pass: launches of all parts, and exchanges between ranks.

use super::all_to_all::RowContent;
use super::in_flight::{Request, Written};
use super::mesh_call::MeshCall;
use super::passes::{LaunchedChunks, SHADOWED, SHARDED, Segment, chunks};
use super::plan_part::{Part, PartCall};
use super::rows::{RowMesh, RowRange, Rows};
use super::tp_peers::TpPeers;
use super::transfers::{RowTransfer, TensorRows, element};
use crate::error::EngineError;
use crate::launch::Bound;
use bytemuck::cast_slice;
use moesaic_collectives::schedules::RowBytes;
use moesaic_collectives::{Call, Reduction, Slice};
use moesaic_dist::{Amount, CollectiveOp, OpGroup};
use moesaic_plan::{self as plan, Exchange, FromTo, Packed, TensorId};
use std::time::Instant;

impl<'l> MeshCall<'l> {
    /// Runs the steps of a pass; `arrive` reserves memory on a part for the rows that arrive there.
    pub fn run(
        &mut self,
        segments: &[Segment],
        mut arrive: impl FnMut(&mut PartCall<'_>, usize) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let LaunchedChunks { count, by } = chunks(segments);
        if count > 1 {
            // Without a progress thread MPI moves data only inside calls, so chunks would not
            // travel while the experts multiply.
            self.groups.start_progress_thread();
        }
        for segment in segments {
            match segment {
                Segment::Launches(part, bound, chunk) => self.launch(*part, bound, *chunk)?,
                Segment::Exchange(exchange) => match exchange.op {
                    CollectiveOp::TokenCounts => {} // exchanged when the call began
                    CollectiveOp::TokensPerExpert => {
                        let recorded = self.begins(exchange);
                        let rows = self.choose_shadows()?;
                        self.ended(recorded, Instant::now());
                        arrive(self.parts.shadows.as_mut().expect(SHADOWED), rows)?;
                        self.upload_shadow_layout()?;
                    }
                    CollectiveOp::RowCounts => {
                        let recorded = self.begins(exchange);
                        let rows = self.count()?.in_chunks(count, by);
                        self.ended(recorded, Instant::now());
                        arrive(&mut self.parts.experts, rows.workspace())?;
                        self.upload_layout(&rows)?;
                        self.counts.rows = Some(rows);
                    }
                    CollectiveOp::TpTokenCounts => {
                        let recorded = self.begins(exchange);
                        let tp_peers = self.count_tp_peers(exchange)?;
                        self.ended(recorded, Instant::now());
                        let shared = self.parts.shared.as_mut().expect(SHARDED);
                        arrive(shared, tp_peers.tokens())?;
                        self.counts.tp_peers = Some(tp_peers);
                    }
                    _ => self.exchange(exchange)?,
                },
                Segment::Together(exchanges) => self.exchange_together(exchanges)?,
            }
        }
        // Exchanges may still access this call's workspace, so it goes back to the pool after the
        // last of them has ended.
        self.finish_all()?;
        self.return_workspace();
        Ok(())
    }

    /// Launches steps of a part, after waiting for the rows that they read.
    fn launch(
        &mut self,
        part: plan::PlanPart,
        bound: &Bound,
        chunk: Option<plan::Chunk>,
    ) -> Result<(), EngineError> {
        // The shadow model often chooses none; its launches would only cost time.
        if part == plan::PlanPart::Shadows && self.counts.own.shadowed.is_empty() {
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
        // The kernels read `offsets` and `row_tiles` from one buffer for all chunks. The upload is
        // in stream order, so it cannot overtake the launch of the chunk before.
        self.upload_chunk_layout(rows, number)?;
        self.parts.experts.run_part(bound, part)
    }

    /// Starts an exchange, and waits for it unless it moves a chunk.
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

    /// Exchanges the rows of several tensors. Where rows travel directly and uncast, one message to
    /// each rank carries all of them.
    fn exchange_together(&mut self, exchanges: &[Exchange]) -> Result<(), EngineError> {
        let packed = |one: &Exchange| self.packed(one).is_some();
        // A schedule with hops and a cast each handle rows of one size, and these exchanges have rows
        // of different sizes.
        if self.rows().hop_counts.is_some() || exchanges.iter().any(packed) {
            return exchanges.iter().try_for_each(|one| self.exchange(one));
        }
        let recorded = self.begins(&exchanges[0]);
        let (mut sends, mut receives, mut written) = (Vec::new(), Vec::new(), Vec::new());
        for exchange in exchanges {
            self.wait_for_sums(exchange)?;
            let Some(RowTransfer { sent, received, .. }) = self.row_transfer(exchange) else {
                continue;
            };
            sends.extend(self.byte_transfers(sent.part, sent.tensor, &sent.ranges)?);
            receives.extend(self.byte_transfers(
                received.part,
                received.tensor,
                &received.ranges,
            )?);
            written.extend(self.written(exchange));
        }
        let names: Vec<&str> = exchanges.iter().map(|one| &*one.name).collect();
        let call = self.call_of(&names.join(" and "), exchanges[0].chunk);
        let request = self.send_by(None, &sends, &receives, &call)?;
        self.keep(&exchanges[0], request, written, recorded)
    }

    /// Waits for the sums over shards of rows that an exchange sends back to the tokens.
    fn wait_for_sums(&mut self, exchange: &Exchange) -> Result<(), EngineError> {
        let rows = exchange.reads();
        let Some(rows) = rows.filter(|_| exchange.op == CollectiveOp::Combine) else {
            return Ok(());
        };
        // Every shard must have the sum before any row of it leaves: the answer would be one
        // shard's part.
        let sums = (rows.part, rows.tensor);
        let chunks = self.rows().numbers(exchange.chunk);
        self.wait_for(|other| (other.part, other.tensor) == sums && other.shares(&chunks))
    }

    fn call_of(&self, name: &str, chunk: Option<plan::Chunk>) -> Call {
        match chunk {
            None => self.call(name),
            Some(chunk) => self.call(&format!("{name}, chunk {chunk},")).overlapped(),
        }
    }

    /// Returns the rows of an exchange, if it moves rows of tokens.
    fn row_transfer(&self, exchange: &Exchange) -> Option<RowTransfer> {
        let (rows, payload) = (self.counts.rows.as_ref()?, exchange.payload?);
        let chunks = rows.numbers(exchange.chunk);
        let (sent, received) = match exchange.op {
            CollectiveOp::Dispatch => (rows.sent(&chunks), rows.arrived(&chunks)),
            _ => (rows.answers(&chunks), rows.answered(&chunks)),
        };
        let (reads, writes) = (exchange.reads()?, exchange.writes()?);
        let of = |at: plan::PartTensor, ranges| TensorRows {
            part: at.part,
            tensor: at.tensor,
            ranges,
        };
        Some(RowTransfer {
            content: RowContent {
                op: exchange.op,
                payload,
                element: element(self.plan.part(reads.part)[reads.tensor].dtype),
            },
            chunks,
            sent: of(reads, sent),
            received: of(writes, received),
        })
    }

    /// Returns the rows of tokens that an exchange writes.
    fn written(&self, exchange: &Exchange) -> Option<Written> {
        let is_rows = exchange.op.row().amount == Amount::ExpertRows;
        let plan::PartTensor { part, tensor } = exchange.writes().filter(|_| is_rows)?;
        Some(Written {
            part,
            tensor,
            chunks: self.rows().numbers(exchange.chunk),
        })
    }

    /// Starts an exchange; returns `None` if it has already ended.
    fn start(&mut self, exchange: &Exchange) -> Result<Option<Request>, EngineError> {
        let row = exchange.op.row();
        let is_of_shadows = matches!(row.amount, Amount::ShadowRows | Amount::ShadowTensor);
        if is_of_shadows && self.counts.own.shadowed.is_empty() {
            return Ok(None); // no expert is shadowed in this call
        }
        let call = self.call_of(&exchange.name, exchange.chunk);
        let Some(FromTo { from, to }) = exchange.tensors else {
            if exchange.op == CollectiveOp::GlobalRouting {
                self.apply_global_routing()?;
            }
            // The counts were exchanged when the call began or in [`MeshCall::run`].
            return Ok(None);
        };
        let dim = exchange.dim;
        let request = match exchange.op {
            CollectiveOp::TokenCounts
            | CollectiveOp::TokensPerExpert
            | CollectiveOp::RowCounts
            | CollectiveOp::TpTokenCounts
            | CollectiveOp::GlobalRouting => return Ok(None),
            CollectiveOp::Dispatch | CollectiveOp::Combine => {
                let Some(transfer) = self.row_transfer(exchange) else {
                    return Ok(None);
                };
                self.send_rows(self.packed(exchange), transfer, &call)
            }
            CollectiveOp::AllReduceTp => self.all_reduce_tp(from, exchange.chunk, &call),
            CollectiveOp::AllGatherTp => self.all_gather_tp(from, to, &call),
            CollectiveOp::ReduceScatterTp => self.reduce_scatter_tp(from, to, &call),
            CollectiveOp::BroadcastTp => self.broadcast_tp(from, to, &call),
            CollectiveOp::AllReduceSum => self.reduce(from, to, Reduction::Sum, &call),
            CollectiveOp::AllReduceMax => self.reduce(from, to, Reduction::Max, &call),
            CollectiveOp::AllGatherExperts => self.all_gather_experts(from, to, &call),
            CollectiveOp::CountLiveTokens => {
                return self.count_live(from, to, &call).map(|()| None);
            }
            CollectiveOp::ReduceLossParts => {
                return self.sum_loss_parts(from, &call).map(|()| None);
            }
            CollectiveOp::AllGatherWeight => {
                return self.gather_weight(from, dim, &call).map(|()| None);
            }
            CollectiveOp::ReduceScatterGradient => {
                return self.scatter_gradient(from, dim, &call).map(|()| None);
            }
            CollectiveOp::KeepShadowRows => {
                return self.keep_shadow_rows(from, to).map(|()| None);
            }
            CollectiveOp::ReturnShadowRows => {
                return self.return_shadow_rows(from, to).map(|()| None);
            }
            CollectiveOp::BroadcastShadowWeight => {
                return self.broadcast_shadow_weight(from, to, &call).map(|()| None);
            }
            CollectiveOp::ReduceShadowGradient => {
                return self.reduce_shadow_gradient(from, to, &call).map(|()| None);
            }
        };
        request.map(Some)
    }

    /// All-reduces rows of the expert part over the shards of the experts.
    fn all_reduce_tp(
        &mut self,
        tensor: TensorId,
        chunk: Option<plan::Chunk>,
        call: &Call,
    ) -> Result<Request, EngineError> {
        let rows = self.rows();
        let span = rows.span(rows.numbers(chunk));
        let element = element(self.plan.experts[tensor].dtype);
        let width = self.plan.row_bytes(plan::PlanPart::Experts, tensor) / element.size();
        let buffer = self.parts.experts.buffer(tensor);
        let data = Slice::new(buffer, element, span.start * width, span.len() * width)?;
        let tp = self.group(OpGroup::ExpertTp);
        let sum = tp.all_reduce(&data, &data, Reduction::Sum, call)?;
        Ok(Request::of(sum, &data))
    }

    /// Gathers rows of the tokens of all TP peers.
    fn all_gather_tp(
        &mut self,
        from: TensorId,
        to: TensorId,
        call: &Call,
    ) -> Result<Request, EngineError> {
        let tp_peers = self.tp_peers();
        let (sent, arrived) = (tp_peers.sent(), tp_peers.arrived());
        let sends = self.byte_transfers(plan::PlanPart::Dispatch, from, &sent)?;
        let receives = self.byte_transfers(plan::PlanPart::Shared, to, &arrived)?;
        self.send(OpGroup::SharedTp, &sends, &receives, call)
    }

    fn tp_peers(&self) -> &TpPeers {
        let tp_peers = self.counts.tp_peers.as_ref();
        tp_peers.expect("tokens are counted before their rows go")
    }

    /// Exchanges rows of tokens by the schedule of the strategy. Where a cast was chosen, rows for
    /// other nodes are cast once at their source and stay cast on every hop.
    fn send_rows(
        &mut self,
        packed: Option<&'l Packed>,
        transfer: RowTransfer,
        call: &Call,
    ) -> Result<Request, EngineError> {
        if let Some(packed) = packed {
            return self.send_packed(packed, transfer, call);
        }
        let RowTransfer {
            content,
            chunks,
            sent,
            received,
        } = transfer;
        let bytes = RowBytes::same(self.plan.row_bytes(sent.part, sent.tensor));
        let path = self.rows().schedule(content, &chunks, bytes, &|_, _| false);
        let sends = self.byte_transfers(sent.part, sent.tensor, &sent.ranges)?;
        let receives = self.byte_transfers(received.part, received.tensor, &received.ranges)?;
        self.send_by(path, &sends, &receives, call)
    }

    /// Reduce-scatters a tensor of all TP peers' tokens: each rank gets the sums of its own tokens.
    fn reduce_scatter_tp(
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
        let output = Slice::new(self.parts.tokens.buffer(to), element, 0, own)?;
        let (tp, reduction) = (&mut self.groups.expert_tp, Reduction::Sum);
        let sum = tp.reduce_scatter_v(&input, &counts, &output, reduction, call)?;
        Ok(Request::of(sum, &input))
    }

    /// Broadcasts a weight of the first shard into the dispatch part of all shards.
    fn broadcast_tp(
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
        // Only the first shard holds such a weight, a last bias; the others hold zeros.
        let sends: Vec<RowRange> = match self.mesh.place().tp {
            0 => (0..self.mesh.parallel().expert_tp).map(chunk).collect(),
            _ => Vec::new(),
        };
        let sends = self.byte_transfers(plan::PlanPart::Shared, from, &sends)?;
        let receives = self.byte_transfers(plan::PlanPart::Dispatch, to, &[chunk(0)])?;
        self.send(OpGroup::SharedTp, &sends, &receives, call)
    }

    /// Uploads the index of each row and the layout of the first chunk for the experts' kernels.
    fn upload_layout(&self, rows: &Rows) -> Result<(), EngineError> {
        // The indices cost a pass over all rows, and an evaluation may lack the tensor.
        if self.parts.experts.named("row_slots").is_some() {
            let slots = rows.numbers_in_chunks();
            self.parts.experts.upload("row_slots", cast_slice(&slots))?;
        }
        self.upload_chunk_layout(rows, 0)
    }

    /// Uploads the layout of a chunk's rows for the experts' kernels, in stream order.
    fn upload_chunk_layout(&self, rows: &Rows, chunk: usize) -> Result<(), EngineError> {
        let tiles = rows.row_tiles(chunk, self.plan.experts.tile_rows());
        let offsets = rows.expert_offsets(chunk);
        self.parts.experts.upload("offsets", cast_slice(&offsets))?;
        self.parts.experts.upload("row_tiles", cast_slice(&tiles))
    }

    /// Reduces a tensor of the dispatch part over all ranks.
    fn reduce(
        &mut self,
        from: TensorId,
        to: TensorId,
        reduction: Reduction,
        call: &Call,
    ) -> Result<Request, EngineError> {
        let tensor = &self.plan.tokens[from];
        let count = tensor.elements(self.parts.tokens.scalars().tokens() as u64) as usize;
        let element = element(tensor.dtype);
        let slice = |id| Slice::new(self.parts.tokens.buffer(id), element, 0, count);
        let (input, output) = (slice(from)?, slice(to)?);
        let world = &mut self.groups.world;
        let sum = world.all_reduce(&input, &output, reduction, call)?;
        Ok(Request::of(sum, &input))
    }

    /// Gathers the weights of the experts of all groups, from the first shard of each.
    fn all_gather_experts(
        &mut self,
        from: TensorId,
        to: TensorId,
        call: &Call,
    ) -> Result<Request, EngineError> {
        let RowMesh { mesh, place } = self.row_mesh();
        let placement = self.plan.row_placement();
        // The consecutive experts that a group owns, as rows of its own tensor or of the whole one.
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
        // Shards hold the same values of what they do not split, so the first shard alone sends.
        let own = match place.tp {
            0 => runs(place.ep, false),
            _ => Vec::new(),
        };
        let sent = |peer| own.iter().map(move |chunk| RowRange { peer, ..*chunk });
        let sends: Vec<RowRange> = (0..mesh.group()).flat_map(sent).collect();
        let receives: Vec<RowRange> = (0..mesh.ep).flat_map(|ep| runs(ep, true)).collect();
        let sends = self.byte_transfers(plan::PlanPart::Experts, from, &sends)?;
        let receives = self.byte_transfers(plan::PlanPart::Dispatch, to, &receives)?;
        self.send(OpGroup::Ep, &sends, &receives, call)
    }
}
