//! A pass of one rank: launches of all sides, and exchanges between ranks.

use super::groups::{Between, Groups, Mesh};
use super::neighbours::Neighbours;
use super::passes::{SHADOWED, SLICED, Segment, pieces};
use super::raw::Beside;
use super::route::{Course, Load};
use super::routing::Routing;
use super::rows::{OwnRows, Piece, Rows};
use super::shadows::{IdleWeights, ShadowWeights};
use super::side::{Part, Side};
use super::under_way::{Started, UnderWay, Written};
use super::wire::Hop;
use crate::error::EngineError;
use crate::launch::Bound;
use crate::layer::Layer;
use crate::trace::Recorder;
use bytemuck::cast_slice;
use moesaic_collectives::plan::{Schedule, RowBytes};
use moesaic_collectives::{Call, Element, Reduction, Slice, Transfer};
use moesaic_kernel::DType;
use moesaic_plan::{self as plan, Exchange, Parallel, Place, RankPlan, ShadowModel};
use moesaic_plan::{TensorId, Way};
use moesaic_spec::WeightSite;
use moesaic_target::Buffer;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

/// Rows of a tensor of a side that an exchange moves.
pub(super) type Moved = (plan::Side, TensorId, Vec<Piece>);

/// A call of one rank.
pub(super) struct Run<'l> {
    pub mesh: &'l Mesh,
    pub plan: &'l RankPlan,
    /// The name of the layer, in errors of exchanges.
    pub label: &'l str,
    /// How rows go to experts; those of a backward pass go as in forward.
    pub course: Course,
    pub groups: MutexGuard<'l, Groups>,
    pub tokens: Side<'l>,
    pub experts: Side<'l>,
    /// Those that the rank owns: where weights are gathered, not those of the experts' side.
    pub owned: &'l Layer,
    /// Where experts may have shadows.
    pub shadows: Option<Side<'l>>,
    /// By what shadows are chosen.
    pub model: &'l ShadowModel,
    /// Where memory for their weights comes from in a pass that trains.
    pub idle_weights: Option<&'l Arc<IdleWeights>>,
    /// Weights of shadows that stay for backward.
    pub shadow_weights: Option<ShadowWeights>,
    /// Where shared experts are sliced.
    pub shared: Option<Side<'l>>,
    /// What routing the tokens of all ranks has decided, where the call needs that.
    pub routing: Option<Arc<Routing>>,
    /// Rows of this rank's tokens, once they are known.
    pub own: Arc<OwnRows>,
    pub rows: Option<Rows>,
    pub neighbours: Option<Neighbours>,
    /// Tensors of the tokens' side that exchanges move.
    pub exchanged: &'l BTreeSet<TensorId>,
    /// What a raw call has of them.
    pub beside: Beside,
    /// Exchanges that are not waited for yet, in their order.
    pub under_way: Vec<UnderWay>,
    /// Where rows are packed for other nodes.
    pub hop: Option<Hop<'l>>,
    /// Who is told of exchanges.
    pub recorder: Option<&'l dyn Recorder>,
}

impl Run<'_> {
    /// Runs the steps of a pass; `arrive` makes room on a side for the rows that come there.
    pub fn run(
        &mut self,
        segments: &[Segment],
        mut arrive: impl FnMut(&mut Side<'_>, usize) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let (pieces, cut) = pieces(segments);
        if pieces > 1 {
            self.groups.help();
        }
        for segment in segments {
            match segment {
                Segment::Launches(side, bound, piece) => self.launch(*side, bound, *piece)?,
                Segment::Exchange(exchange) => match exchange.way {
                    Way::Tokens => {} // when the call began
                    Way::Loads => {
                        let recorded = self.begins(exchange);
                        let rows = self.choose_shadows()?;
                        self.ended(recorded, Instant::now());
                        arrive(self.shadows.as_mut().expect(SHADOWED), rows)?;
                        self.lay_out_shadows()?;
                    }
                    Way::Counts => {
                        let recorded = self.begins(exchange);
                        let rows = self.count()?.in_pieces(pieces, cut);
                        self.ended(recorded, Instant::now());
                        arrive(&mut self.experts, rows.room())?;
                        self.lay_out(&rows)?;
                        self.rows = Some(rows);
                    }
                    Way::Neighbours => {
                        let recorded = self.begins(exchange);
                        let neighbours = self.count_neighbours(exchange)?;
                        self.ended(recorded, Instant::now());
                        let shared = self.shared.as_mut().expect(SLICED);
                        arrive(shared, neighbours.tokens())?;
                        self.neighbours = Some(neighbours);
                    }
                    _ => self.exchange(exchange)?,
                },
                Segment::Together(exchanges) => self.together(exchanges)?,
            }
        }
        self.finish_all()?;
        self.return_lent();
        Ok(())
    }

    /// Launches steps of a side when what they read has come.
    fn launch(
        &mut self,
        side: plan::Side,
        bound: &Bound,
        piece: Option<plan::Piece>,
    ) -> Result<(), EngineError> {
        if side == plan::Side::Shadows && self.own.shadowed.is_empty() {
            return Ok(());
        }
        let Some(piece) = piece else {
            self.wait_for(|written| written.side == side)?;
            return self.side(side).run(bound);
        };
        let number = piece.number;
        self.wait_for(|written| written.side == side && written.pieces.contains(&number))?;
        let rows = self.rows();
        let part = Part {
            piece,
            first: rows.first_of(number),
            rows: rows.rows_of(number),
        };
        self.lay_out_piece(rows, number)?;
        self.experts.run_part(bound, part)
    }

    pub(super) fn side(&self, side: plan::Side) -> &Side<'_> {
        match side {
            plan::Side::Tokens => &self.tokens,
            plan::Side::Experts => &self.experts,
            plan::Side::Shadows => self.shadows.as_ref().expect(SHADOWED),
            plan::Side::Shared => self.shared.as_ref().expect(SLICED),
        }
    }

    pub(super) fn call(&self, name: &str) -> Call {
        Call::new(&format!("{} of {}", name, self.label))
    }

    /// Begins an exchange, and waits for it unless it is of a piece.
    fn exchange(&mut self, exchange: &Exchange) -> Result<(), EngineError> {
        let written = self.written(exchange).into_iter().collect();
        self.wait_for_sums(exchange)?;
        let recorded = self.begins(exchange);
        match self.start(exchange)? {
            None => self.ended(recorded, Instant::now()),
            Some(started) => self.keep(exchange, started, written, recorded)?,
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
        let call = self.call_of(&names.join(" and "), exchanges[0].piece);
        let started = self.send_by(None, &sends, &receives, &call)?;
        self.keep(&exchanges[0], started, written, recorded)
    }

    /// What goes back to the tokens is first summed over slices.
    fn wait_for_sums(&mut self, exchange: &Exchange) -> Result<(), EngineError> {
        let Way::ToTokens { from, .. } = exchange.way else {
            return Ok(());
        };
        let sums = (plan::Side::Experts, from);
        let pieces = self.rows().numbers(exchange.piece);
        self.wait_for(|other| (other.side, other.tensor) == sums && other.shares(&pieces))
    }

    fn call_of(&self, name: &str, piece: Option<plan::Piece>) -> Call {
        match piece {
            None => self.call(name),
            Some(piece) => self.call(&format!("{name}, piece {piece},")).beside(),
        }
    }

    /// What the rows of tokens that an exchange moves are, those that this rank sends, and those
    /// that come.
    fn moved(&self, exchange: &Exchange) -> Option<(Load, Moved, Moved)> {
        let (tokens, experts) = (plan::Side::Tokens, plan::Side::Experts);
        match exchange.way {
            Way::ToExperts { from, to } => {
                let rows = self.rows();
                let pieces = rows.numbers(exchange.piece);
                let sent = (tokens, from, rows.sent(&pieces));
                let arrived = (experts, to, rows.arrived(&pieces));
                Some((self.load(from), sent, arrived))
            }
            Way::ToTokens { from, to } => {
                let rows = self.rows();
                let pieces = rows.numbers(exchange.piece);
                let answers = (experts, from, rows.answers(&pieces));
                let answered = (tokens, to, rows.answered(&pieces));
                Some((self.load_back(from), answers, answered))
            }
            _ => None,
        }
    }

    /// What an exchange of rows writes.
    fn written(&self, exchange: &Exchange) -> Option<Written> {
        let (side, tensor) = match exchange.way {
            Way::ToExperts { to, .. } => (plan::Side::Experts, to),
            Way::OverShards { tensor } => (plan::Side::Experts, tensor),
            Way::ToTokens { to, .. } => (plan::Side::Tokens, to),
            _ => return None,
        };
        Some(Written {
            side,
            tensor,
            pieces: self.rows().numbers(exchange.piece),
        })
    }

    /// Begins an exchange; `None` if it is over then.
    fn start(&mut self, exchange: &Exchange) -> Result<Option<Started>, EngineError> {
        let call = self.call_of(&exchange.name, exchange.piece);
        let started = match exchange.way {
            Way::ToShadows { .. }
            | Way::FromShadows { .. }
            | Way::ShadowWeight { .. }
            | Way::ShadowGradient { .. }
                if self.own.shadowed.is_empty() =>
            {
                return Ok(None); // no expert has one in this call
            }
            // Done when the call begins, or by [`Run::run`].
            Way::Tokens | Way::Loads | Way::Counts | Way::Neighbours => return Ok(None),
            Way::ToExperts { .. } | Way::ToTokens { .. } => {
                let Some((load, sent, came)) = self.moved(exchange) else {
                    return Ok(None);
                };
                let pieces = self.rows().numbers(exchange.piece);
                self.send_rows(&exchange.name, (load, pieces), sent, came, &call)
            }
            Way::OverShards { tensor } => {
                let rows = self.rows();
                let span = rows.span(rows.numbers(exchange.piece));
                let element = element(self.plan.experts[tensor].dtype);
                let width = self.plan.row_bytes(plan::Side::Experts, tensor) / element.size();
                let buffer = self.experts.buffer(tensor);
                let data = Slice::new(buffer, element, span.start * width, span.len() * width)?;
                let slices = self.groups.between(Between::Parts(self.plan.ways));
                let sum = slices.all_reduce(&data, &data, Reduction::Sum, &call)?;
                Ok(Started::of(sum, &data))
            }
            Way::ToSlices { from, to } => {
                let neighbours = self.neighbours();
                let (sent, arrived) = (neighbours.sent(), neighbours.arrived());
                let sends = self.transfers(plan::Side::Tokens, from, &sent)?;
                let receives = self.transfers(plan::Side::Shared, to, &arrived)?;
                self.send(Between::Slices, &sends, &receives, &call)
            }
            Way::FromSlices { from, to } => self.sum_to_tokens(from, to, &call),
            Way::OfFirst { from, to } => self.take_of_first(from, to, &call),
            Way::Sum { from, to } => self.reduce(from, to, Reduction::Sum, &call),
            Way::Live { ids, to } => return self.count_live(ids, to, &call).map(|()| None),
            Way::Placed => return self.place_as_of_all().map(|()| None),
            Way::LossParts { tensor } => return self.sum_loss_parts(tensor, &call).map(|()| None),
            Way::Most { tensor } => self.reduce(tensor, tensor, Reduction::Max, &call),
            Way::GatherWeight { weight, cut } => {
                return self.gather_weight(weight, cut, &call).map(|()| None);
            }
            Way::ScatterGradient { gradient, cut } => {
                return self.scatter_gradient(gradient, cut, &call).map(|()| None);
            }
            Way::Gather { from, to } => self.gather(from, to, &call),
            Way::ToShadows { from, to } => return self.stay(from, to).map(|()| None),
            Way::FromShadows { from, to } => return self.leave(from, to).map(|()| None),
            Way::ShadowWeight { from, to } => {
                return self.send_weight(from, to, &call).map(|()| None);
            }
            Way::ShadowGradient { from, to } => {
                return self.sum_gradient(from, to, &call).map(|()| None);
            }
        };
        started.map(Some)
    }

    /// The mesh that rows travel in, and this rank's place there.
    pub(super) fn travels(&self) -> (Parallel, Place) {
        let by = self.plan.by();
        (by.mesh(), by.place(self.mesh.rank()))
    }

    pub(super) fn rows(&self) -> &Rows {
        self.rows.as_ref().expect("rows are counted before they go")
    }

    fn neighbours(&self) -> &Neighbours {
        let neighbours = self.neighbours.as_ref();
        neighbours.expect("tokens are counted before their rows go")
    }

    pub fn send(
        &mut self,
        between: Between,
        sends: &[Transfer],
        receives: &[Transfer],
        call: &Call,
    ) -> Result<Started, EngineError> {
        let group = self.groups.between(between);
        let handle = group.exchange(sends, receives, call)?;
        Ok(Started::sending(handle, sends))
    }

    /// Rows of tokens, straight or by way of other ranks. Where that was chosen, those for other
    /// nodes are packed, and so all the way.
    fn send_rows(
        &mut self,
        name: &str,
        load: (Load, Range<usize>),
        sent: Moved,
        came: Moved,
        call: &Call,
    ) -> Result<Started, EngineError> {
        if let Some(packed) = self.packed(name) {
            return self.send_packed(packed, load, sent, came, call);
        }
        let bytes = RowBytes::same(self.plan.row_bytes(sent.0, sent.1));
        let path = self
            .rows()
            .schedule(load.0, &load.1, (bytes, &|_, _| false));
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
    ) -> Result<Started, EngineError> {
        let group = self.groups.between(Between::Rows(self.plan.ways));
        let handle = match path {
            None => group.exchange(sends, receives, call)?,
            Some(path) => group.exchange_with(sends, receives, &*path, call)?,
        };
        Ok(Started::sending(handle, sends))
    }

    /// Rows of a tensor as bytes: they are only moved.
    pub(super) fn transfers(
        &self,
        side: plan::Side,
        tensor: TensorId,
        pieces: &[Piece],
    ) -> Result<Vec<Transfer>, EngineError> {
        let bytes = self.plan.row_bytes(side, tensor);
        transfers(self.side(side).buffer(tensor), bytes, pieces)
    }

    /// Whether rows of a token are equal: `rows` are not where dispatch weights them.
    fn load(&self, from: TensorId) -> Load {
        let weighted = self.plan.tokens.spec.router.weight_on == WeightSite::Input;
        match self.plan.tokens[from].name.as_str() {
            "dout" => Load::Tokens,
            "rows" if !weighted => Load::Tokens,
            _ => Load::Rows,
        }
    }

    /// Whether what comes back is but added up. `combine` weights `out` where that was not
    /// done before, and gradients of weights that were on inputs read `drows`.
    fn load_back(&self, from: TensorId) -> Load {
        let tensor = &self.plan.experts[from];
        let weight_on = self.plan.tokens.spec.router.weight_on;
        match tensor.name.as_str() {
            "out" if weight_on != WeightSite::Output => Load::Addends(element(tensor.dtype)),
            "drows" if weight_on != WeightSite::Input => Load::Addends(element(tensor.dtype)),
            _ => Load::Answers,
        }
    }

    /// A tensor of all slices' tokens, whose sums over slices go to the tokens' ranks.
    fn sum_to_tokens(
        &mut self,
        from: TensorId,
        to: TensorId,
        call: &Call,
    ) -> Result<Started, EngineError> {
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
        let sum = slices.reduce_scatter_v(&input, &counts, &output, reduction, call)?;
        Ok(Started::of(sum, &input))
    }

    /// A weight of the first slice becomes that of the tokens' side of all.
    fn take_of_first(
        &mut self,
        from: TensorId,
        to: TensorId,
        call: &Call,
    ) -> Result<Started, EngineError> {
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
        self.send(Between::Slices, &sends, &receives, call)
    }

    /// Tells the experts' kernels which row is which, and where rows of the first piece lie.
    fn lay_out(&self, rows: &Rows) -> Result<(), EngineError> {
        if self.experts.named("row_slots").is_some() {
            let slots = rows.numbers_in_pieces();
            self.experts.tell("row_slots", cast_slice(&slots))?;
        }
        self.lay_out_piece(rows, 0)
    }

    /// Tells the experts' kernels where rows of a piece lie, in the order of the stream.
    fn lay_out_piece(&self, rows: &Rows, piece: usize) -> Result<(), EngineError> {
        let tiles = rows.row_tiles(piece, self.plan.experts.tile_rows());
        let offsets = rows.expert_offsets(piece);
        self.experts.tell("offsets", cast_slice(&offsets))?;
        self.experts.tell("row_tiles", cast_slice(&tiles))
    }

    /// Numbers of the tokens' side, over all ranks.
    fn reduce(
        &mut self,
        from: TensorId,
        to: TensorId,
        reduction: Reduction,
        call: &Call,
    ) -> Result<Started, EngineError> {
        let tensor = &self.plan.tokens[from];
        let count = tensor.elements(self.tokens.scalars().tokens() as u64) as usize;
        let element = element(tensor.dtype);
        let slice = |id| Slice::new(self.tokens.buffer(id), element, 0, count);
        let (input, output) = (slice(from)?, slice(to)?);
        let world = &mut self.groups.world;
        let sum = world.all_reduce(&input, &output, reduction, call)?;
        Ok(Started::of(sum, &input))
    }

    /// Weights of the experts of all groups; those of the first slices count.
    fn gather(
        &mut self,
        from: TensorId,
        to: TensorId,
        call: &Call,
    ) -> Result<Started, EngineError> {
        let (mesh, place) = self.travels();
        let placement = self.plan.row_placement();
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
        self.send(Between::Rows(self.plan.ways), &sends, &receives, call)
    }
}

/// Rows of so many bytes.
pub(super) fn transfers(
    buffer: &Arc<Buffer>,
    bytes: usize,
    pieces: &[Piece],
) -> Result<Vec<Transfer>, EngineError> {
    let transfer = |piece: &Piece| {
        let (first, size) = (piece.first * bytes, piece.rows * bytes);
        Ok(Transfer {
            peer: piece.peer,
            slice: Slice::new(buffer, Element::U8, first, size)?,
        })
    };
    pieces.iter().map(transfer).collect()
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
