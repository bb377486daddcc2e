//! Rows that a node sums for the tokens of others, packed when they are summed.
//!
//! ```text
//! exchange     inside nodes: answers to whoever sums them; each sum in f32, rounded once
//! comm_cast_pack    sums to bytes
//! exchange     group nodes: one row for each token and node
//! comm_cast_unpack  to the token's first row of that node; zeros to its others
//! ```

use super::comm_cast::{IncomingRows, MAY_CAST};
use super::in_flight::Request;
use super::rows::RowRange;
use super::run::{Moved, Run, transfers};
use crate::error::EngineError;
use moesaic_collectives::plan::IntraNodeCombine;
use moesaic_collectives::{Call, NodeShape};
use moesaic_plan::Packed;
use moesaic_target::Buffer;
use std::sync::Arc;

/// DedupCombine that go to other nodes, and those that come from there.
struct Crossing {
    /// For the rank of the own place in each other node, rows of this rank's sums.
    sent: Vec<RowRange>,
    /// From these ranks, rows of the wire.
    came: Vec<RowRange>,
    /// Which row of the tensor each row of the wire is: those of `came`, then those of tokens
    /// whose sum comes in another row.
    places: Vec<i32>,
}

impl Crossing {
    /// `far` are the rows that other nodes answer, by rank.
    fn new(sums: &IntraNodeCombine, shape: NodeShape, own: usize, far: &[RowRange]) -> Crossing {
        let (node, place) = shape.split(own);
        let (mut sent, mut came) = (Vec::new(), Vec::new());
        let (mut firsts, mut others) = (Vec::new(), Vec::new());
        for other in (0..shape.nodes).filter(|other| *other != node) {
            let peer = shape.rank(other, place);
            let (first, rows) = (end_of(&sent), sums.tokens(other));
            sent.push(RowRange { peer, first, rows });
            let first = firsts.len();
            let there = far
                .iter()
                .filter(|chunk| shape.split(chunk.peer).0 == other);
            let rows = there.flat_map(|chunk| chunk.first..chunk.first + chunk.rows);
            for (row, is_first) in rows.zip(sums.firsts(other)) {
                let list = if is_first { &mut firsts } else { &mut others };
                list.push(row as i32);
            }
            let rows = firsts.len() - first;
            came.push(RowRange { peer, first, rows });
        }
        for chunks in [&mut sent, &mut came] {
            chunks.retain(|chunk| chunk.rows > 0);
        }
        let places = [firsts, others].concat();
        Crossing { sent, came, places }
    }
}

/// Rows of all of these, which lie one after the other.
fn end_of(chunks: &[RowRange]) -> usize {
    chunks.last().map_or(0, |last| last.first + last.rows)
}

impl<'l> Run<'l> {
    /// As [`Run::send_packed`], of answers that are summed inside nodes. The first exchange is
    /// waited for: what it brings is packed.
    pub(super) fn send_sums(
        &mut self,
        packed: &'l Packed,
        (sums, shape): (&IntraNodeCombine, NodeShape),
        sent: Moved,
        came: Moved,
        call: &Call,
    ) -> Result<Request, EngineError> {
        let own = self.own_member();
        let is_near = |chunk: &RowRange| shape.split(chunk.peer).0 == shape.split(own).0;
        let (part, tensor) = (came.0, came.1);
        let (near, far): (Vec<RowRange>, Vec<RowRange>) = came.2.into_iter().partition(is_near);
        let dedup_indices = Crossing::new(sums, shape, own, &far);
        let device = Arc::clone(&self.owned.device);
        let bytes = self.plan.row_bytes(sent.0, sent.1);
        let (gone, arrive) = (end_of(&dedup_indices.sent), end_of(&dedup_indices.came));
        let summed = self.groups.workspaces.take(&*device, gone * bytes)?;
        let inside = [(sent.0, sent.1, sent.2), (part, tensor, near)];
        let inside = self.sum_inside(sums, inside, (&summed, &dedup_indices.sent), call)?;
        let cast = self.cast.as_mut().expect(MAY_CAST);
        let mut workspace = cast.workspace(gone.max(dedup_indices.places.len()))?;
        let all: Vec<i32> = (0..gone as i32).collect();
        cast.pack(&mut workspace, packed, &summed, &all)?;
        self.groups.workspaces.give([summed]);
        let zeros = vec![0; (dedup_indices.places.len() - arrive) * packed.row_bytes];
        if !zeros.is_empty() {
            let behind = arrive * packed.row_bytes;
            device.upload(&zeros, workspace.buffer(packed.came.bytes), behind)?;
        }
        let sends =
            workspace.transfers(packed.sent.bytes, packed.row_bytes, &dedup_indices.sent)?;
        let receives =
            workspace.transfers(packed.came.bytes, packed.row_bytes, &dedup_indices.came)?;
        let request = self.send_by(None, &sends, &receives, call)?;
        let incoming = IncomingRows {
            packed: packed.clone(),
            part,
            tensor,
            places: dedup_indices.places,
            workspace,
        };
        Ok(Request {
            bytes: request.bytes + inside,
            incoming: Some(incoming),
            ..request
        })
    }

    /// Answers inside nodes, and sums of those for other nodes; the bytes that this rank has
    /// sent for that.
    fn sum_inside(
        &mut self,
        sums: &IntraNodeCombine,
        [sent, near]: [Moved; 2],
        (summed, rows): (&Arc<Buffer>, &[RowRange]),
        call: &Call,
    ) -> Result<u64, EngineError> {
        let bytes = self.plan.row_bytes(sent.0, sent.1);
        let sends = self.transfers(sent.0, sent.1, &sent.2)?;
        let mut receives = self.transfers(near.0, near.1, &near.2)?;
        receives.extend(transfers(summed, bytes, rows)?);
        let request = self.send_by(Some(Box::new(sums.clone())), &sends, &receives, call)?;
        let sent = request.bytes;
        self.complete(request)?;
        Ok(sent)
    }
}
