//! Exchanges of rows that are cast for other nodes.

use super::comm_cast::{IncomingRows, MAY_CAST, NodeSplit};
use super::in_flight::Request;
use super::mesh_call::MeshCall;
use super::rows::RowMesh;
use super::transfers::RowTransfer;
use crate::error::EngineError;
use moesaic_collectives::schedules::{AddendRow, DedupCombine, RowBytes};
use moesaic_collectives::{Call, Transfer};
use moesaic_dist::Payload;
use moesaic_plan::{Exchange, Packed, RankCoords};

impl<'l> MeshCall<'l> {
    /// Returns the cast of an exchange's rows, if it has one.
    pub(super) fn packed(&self, exchange: &Exchange) -> Option<&'l Packed> {
        self.transfers.cast.as_ref()?.packing.packed(exchange)
    }

    /// As [`MeshCall::send_rows`], with rows for other nodes cast before the exchange and back
    /// after it.
    pub(super) fn send_packed(
        &mut self,
        packed: &'l Packed,
        transfer: RowTransfer,
        call: &Call,
    ) -> Result<Request, EngineError> {
        let RowTransfer {
            content,
            chunks,
            sent,
            received,
        } = transfer;
        let near = self.plan.row_bytes(sent.part, sent.tensor);
        let dedup = self.rows().dedup.as_ref();
        if let Some(dedup) = dedup.filter(|_| content.payload == Payload::PartialSums) {
            let (shape, element) = (dedup.shape(), content.element);
            let sums = self
                .rows()
                .sums(
                    &chunks,
                    AddendRow {
                        element,
                        bytes: near,
                    },
                )
                .map(DedupCombine::inside_nodes);
            let sums = sums.expect("deduplicated rows have a map of tokens");
            return self.send_sums(packed, &sums, shape, [sent, received], call);
        }
        let hosts = self.hosts();
        let is_remote = |from: usize, to: usize| hosts[from] != hosts[to];
        // Intermediate ranks need the size of each row to pass it on: cast rows between nodes,
        // uncast rows inside one.
        let far = packed.row_bytes;
        let path = (self.rows()).schedule(content, &chunks, RowBytes { near, far }, &is_remote);
        let own = self.own_member();
        let out = NodeSplit::of(&sent.ranges, |peer| is_remote(own, peer));
        let back = NodeSplit::of(&received.ranges, |peer| is_remote(own, peer));
        // One workspace holds the rows that leave and those that arrive, each in its own tensor, so
        // it is as large as the larger of the two needs.
        let rows = out.places.len().max(back.places.len());
        let cast = self.transfers.cast.as_mut().expect(MAY_CAST);
        let mut workspace = cast.workspace(rows)?;
        let cast = self.transfers.cast.as_ref().expect(MAY_CAST);
        cast.pack(
            &mut workspace,
            packed,
            self.part(sent.part).buffer(sent.tensor),
            &out.places,
        )?;
        let near = self.byte_transfers(sent.part, sent.tensor, &out.near)?;
        let far = workspace.transfers(packed.sent.bytes, packed.row_bytes, &out.far)?;
        let sends = by_peer(near, far);
        let near = self.byte_transfers(received.part, received.tensor, &back.near)?;
        let far = workspace.transfers(packed.received.bytes, packed.row_bytes, &back.far)?;
        let receives = by_peer(near, far);
        let request = self.send_by(path, &sends, &receives, call)?;
        let incoming = IncomingRows {
            packed: packed.clone(),
            part: received.part,
            tensor: received.tensor,
            places: back.places,
            workspace,
        };
        Ok(Request {
            incoming: Some(incoming),
            ..request
        })
    }

    /// Returns the hosts of the ranks that exchange rows, in their order.
    fn hosts(&self) -> Vec<&'l str> {
        let mesh = self.mesh;
        let RowMesh {
            mesh: travels,
            place,
        } = self.row_mesh();
        let host = |member: usize| {
            let (ep, tp) = (member / travels.expert_tp, member % travels.expert_tp);
            let rank = self.plan.by().rank(RankCoords { ep, tp, ..place });
            &*mesh.hosts()[rank]
        };
        (0..travels.group()).map(host).collect()
    }
}

/// Returns the messages of both, ordered by peer. Sender and receiver must list messages in the
/// same order.
fn by_peer(near: Vec<Transfer>, far: Vec<Transfer>) -> Vec<Transfer> {
    let mut all = [near, far].concat();
    // A stable sort, so the ranges of one peer keep the order in which that peer lists them.
    all.sort_by_key(|transfer| transfer.peer);
    all
}
