//! Deduplicated combine with casts: a node sums rows for the tokens of other nodes, and the sums
//! are cast.
//!
//! ```text
//! exchange     inside nodes: answers to whoever sums them; each sum in f32, rounded once
//! comm_cast_pack    sums to bytes
//! exchange     between nodes: one row for each token and node
//! comm_cast_unpack  to the token's first row of that node; zeros to its others
//! ```

use super::comm_cast::{IncomingRows, MAY_CAST};
use super::in_flight::Request;
use super::mesh_call::MeshCall;
use super::rows::RowRange;
use super::transfers::{TensorRows, transfers};
use crate::error::EngineError;
use moesaic_collectives::schedules::IntraNodeCombine;
use moesaic_collectives::{Call, NodeRank, NodeShape};
use moesaic_plan::Packed;
use moesaic_target::Buffer;
use std::sync::Arc;

/// The sums that go to other nodes, and those that come from there.
struct SumRows {
    /// For the rank with this rank's index in each other node: rows of this rank's sums.
    sent: Vec<RowRange>,
    /// From these ranks: cast rows.
    received: Vec<RowRange>,
    /// The index in the tensor of each cast row: those of `received`, then those of tokens whose
    /// sum arrives in another row.
    places: Vec<i32>,
}

impl SumRows {
    /// Splits sums by node; `far` are the rows that other nodes answer, by rank.
    fn new(sums: &IntraNodeCombine, shape: NodeShape, own: usize, far: &[RowRange]) -> SumRows {
        let NodeRank { node, place } = shape.split(own);
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        let (mut firsts, mut others) = (Vec::new(), Vec::new());
        for other in (0..shape.nodes).filter(|other| *other != node) {
            let peer = shape.rank(other, place);
            let (first, rows) = (end_of(&sent), sums.tokens(other));
            sent.push(RowRange { peer, first, rows });
            let first = firsts.len();
            let there = far
                .iter()
                .filter(|chunk| shape.split(chunk.peer).node == other);
            let rows = there.flat_map(|chunk| chunk.first..chunk.first + chunk.rows);
            for (row, is_first) in rows.zip(sums.firsts(other)) {
                let list = if is_first { &mut firsts } else { &mut others };
                list.push(row as i32);
            }
            let rows = firsts.len() - first;
            received.push(RowRange { peer, first, rows });
        }
        for chunks in [&mut sent, &mut received] {
            chunks.retain(|chunk| chunk.rows > 0);
        }
        // Rows that arrive come first, so that the zeros of all the others are one upload behind
        // them.
        let places = [firsts, others].concat();
        SumRows {
            sent,
            received,
            places,
        }
    }
}

/// Returns the end of ranges that lie one after the other.
fn end_of(chunks: &[RowRange]) -> usize {
    chunks.last().map_or(0, |last| last.first + last.rows)
}

impl<'l> MeshCall<'l> {
    /// As [`MeshCall::send_packed`], for answers that are summed inside nodes. This waits for the
    /// first exchange, because the rows that it brings are cast next.
    pub(super) fn send_sums(
        &mut self,
        packed: &'l Packed,
        sums: &IntraNodeCombine,
        shape: NodeShape,
        [sent, received]: [TensorRows; 2],
        call: &Call,
    ) -> Result<Request, EngineError> {
        let own = self.own_member();
        let is_near = |chunk: &RowRange| shape.split(chunk.peer).node == shape.split(own).node;
        let (part, tensor) = (received.part, received.tensor);
        let (near, far): (Vec<RowRange>, Vec<RowRange>) =
            received.ranges.into_iter().partition(is_near);
        let split = SumRows::new(sums, shape, own, &far);
        let device = Arc::clone(&self.parts.owned.device);
        let bytes = self.plan.row_bytes(sent.part, sent.tensor);
        let (gone, arrive) = (end_of(&split.sent), end_of(&split.received));
        let summed = self.groups.workspaces.take(&*device, gone * bytes)?;
        let received = TensorRows {
            part,
            tensor,
            ranges: near,
        };
        let inside = self.sum_inside_node(sums, [sent, received], (&summed, &split.sent), call)?;
        let cast = self.transfers.cast.as_mut().expect(MAY_CAST);
        let mut workspace = cast.workspace(gone.max(split.places.len()))?;
        let all: Vec<i32> = (0..gone as i32).collect();
        cast.pack(&mut workspace, packed, &summed, &all)?;
        // The cast that reads the sums is in the stream before any launch that takes this buffer
        // next.
        self.groups.workspaces.give([summed]);
        // `combine` adds all rows of a token. The sum arrives in the token's first row, so its
        // other rows must be zeros: a cast row of zero bytes is zero in every dtype.
        let zeros = vec![0; (split.places.len() - arrive) * packed.row_bytes];
        if !zeros.is_empty() {
            let behind = arrive * packed.row_bytes;
            device.upload(&zeros, workspace.buffer(packed.received.bytes), behind)?;
        }
        let sends = workspace.transfers(packed.sent.bytes, packed.row_bytes, &split.sent)?;
        let receives =
            workspace.transfers(packed.received.bytes, packed.row_bytes, &split.received)?;
        let request = self.send_by(None, &sends, &receives, call)?;
        let incoming = IncomingRows {
            packed: packed.clone(),
            part,
            tensor,
            places: split.places,
            workspace,
        };
        Ok(Request {
            bytes: request.bytes + inside,
            incoming: Some(incoming),
            ..request
        })
    }

    /// Exchanges answers and sums inside the node; returns the bytes that this rank sent.
    fn sum_inside_node(
        &mut self,
        sums: &IntraNodeCombine,
        [sent, near]: [TensorRows; 2],
        (summed, rows): (&Arc<Buffer>, &[RowRange]),
        call: &Call,
    ) -> Result<u64, EngineError> {
        let bytes = self.plan.row_bytes(sent.part, sent.tensor);
        let sends = self.byte_transfers(sent.part, sent.tensor, &sent.ranges)?;
        let mut receives = self.byte_transfers(near.part, near.tensor, &near.ranges)?;
        receives.extend(transfers(summed, bytes, rows)?);
        let request = self.send_by(Some(Box::new(sums.clone())), &sends, &receives, call)?;
        let sent = request.bytes;
        self.complete(request)?;
        Ok(sent)
    }
}
