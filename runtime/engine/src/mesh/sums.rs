//! Rows that a node sums for the tokens of others, packed when they are summed.
//!
//! ```text
//! exchange     inside nodes: answers to whoever sums them; each sum in f32, rounded once
//! comm_cast_pack    sums to bytes
//! exchange     between nodes: one row for each token and node
//! comm_cast_unpack  to the token's first row of that node; zeros to its others
//! ```

use super::rows::Piece;
use super::run::{Moved, Run, transfers};
use super::under_way::Started;
use super::wire::{Coming, MAY};
use crate::error::EngineError;
use moesaic_collectives::plan::NodeSums;
use moesaic_collectives::{Call, NodeShape};
use moesaic_plan::Packed;
use moesaic_target::Buffer;
use std::sync::Arc;

/// Sums that go to other nodes, and those that come from there.
struct Crossing {
    /// For the rank of the own place in each other node, rows of this rank's sums.
    sent: Vec<Piece>,
    /// From these ranks, rows of the wire.
    came: Vec<Piece>,
    /// Which row of the tensor each row of the wire is: those of `came`, then those of tokens
    /// whose sum comes in another row.
    places: Vec<i32>,
}

impl Crossing {
    /// `far` are the rows that other nodes answer, by rank.
    fn new(sums: &NodeSums, shape: NodeShape, own: usize, far: &[Piece]) -> Crossing {
        let (node, place) = shape.split(own);
        let (mut sent, mut came) = (Vec::new(), Vec::new());
        let (mut firsts, mut others) = (Vec::new(), Vec::new());
        for other in (0..shape.nodes).filter(|other| *other != node) {
            let peer = shape.rank(other, place);
            let (first, rows) = (end_of(&sent), sums.tokens(other));
            sent.push(Piece { peer, first, rows });
            let first = firsts.len();
            let there = far
                .iter()
                .filter(|piece| shape.split(piece.peer).0 == other);
            let rows = there.flat_map(|piece| piece.first..piece.first + piece.rows);
            for (row, is_first) in rows.zip(sums.firsts(other)) {
                let list = if is_first { &mut firsts } else { &mut others };
                list.push(row as i32);
            }
            let rows = firsts.len() - first;
            came.push(Piece { peer, first, rows });
        }
        for pieces in [&mut sent, &mut came] {
            pieces.retain(|piece| piece.rows > 0);
        }
        let places = [firsts, others].concat();
        Crossing { sent, came, places }
    }
}

/// Rows of all of these, which lie one after the other.
fn end_of(pieces: &[Piece]) -> usize {
    pieces.last().map_or(0, |last| last.first + last.rows)
}

impl<'l> Run<'l> {
    /// As [`Run::send_packed`], of answers that are summed inside nodes. The first exchange is
    /// waited for: what it brings is packed.
    pub(super) fn send_sums(
        &mut self,
        packed: &'l Packed,
        (sums, shape): (&NodeSums, NodeShape),
        sent: Moved,
        came: Moved,
        call: &Call,
    ) -> Result<Started, EngineError> {
        let own = self.own_member();
        let is_near = |piece: &Piece| shape.split(piece.peer).0 == shape.split(own).0;
        let (side, tensor) = (came.0, came.1);
        let (near, far): (Vec<Piece>, Vec<Piece>) = came.2.into_iter().partition(is_near);
        let crossing = Crossing::new(sums, shape, own, &far);
        let device = Arc::clone(&self.owned.device);
        let bytes = self.plan.row_bytes(sent.0, sent.1);
        let (gone, arrive) = (end_of(&crossing.sent), end_of(&crossing.came));
        let summed = self.groups.spare.take(&*device, gone * bytes)?;
        let inside = [(sent.0, sent.1, sent.2), (side, tensor, near)];
        let inside = self.sum_inside(sums, inside, (&summed, &crossing.sent), call)?;
        let hop = self.hop.as_mut().expect(MAY);
        let mut room = hop.room(gone.max(crossing.places.len()))?;
        let all: Vec<i32> = (0..gone as i32).collect();
        hop.pack(&mut room, packed, &summed, &all)?;
        self.groups.spare.give([summed]);
        let zeros = vec![0; (crossing.places.len() - arrive) * packed.row_bytes];
        if !zeros.is_empty() {
            let behind = arrive * packed.row_bytes;
            device.upload(&zeros, room.buffer(packed.came.bytes), behind)?;
        }
        let sends = room.transfers(packed.sent.bytes, packed.row_bytes, &crossing.sent)?;
        let receives = room.transfers(packed.came.bytes, packed.row_bytes, &crossing.came)?;
        let started = self.send_by(None, &sends, &receives, call)?;
        let coming = Coming {
            packed: packed.clone(),
            side,
            tensor,
            places: crossing.places,
            room,
        };
        Ok(Started {
            bytes: started.bytes + inside,
            coming: Some(coming),
            ..started
        })
    }

    /// Answers inside nodes, and sums of those for other nodes; the bytes that this rank has
    /// sent for that.
    fn sum_inside(
        &mut self,
        sums: &NodeSums,
        [sent, near]: [Moved; 2],
        (summed, rows): (&Arc<Buffer>, &[Piece]),
        call: &Call,
    ) -> Result<u64, EngineError> {
        let bytes = self.plan.row_bytes(sent.0, sent.1);
        let sends = self.transfers(sent.0, sent.1, &sent.2)?;
        let mut receives = self.transfers(near.0, near.1, &near.2)?;
        receives.extend(transfers(summed, bytes, rows)?);
        let started = self.send_by(Some(Box::new(sums.clone())), &sends, &receives, call)?;
        let sent = started.bytes;
        self.complete(started)?;
        Ok(sent)
    }
}
