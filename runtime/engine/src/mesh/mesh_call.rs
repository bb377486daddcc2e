//! The state of one call of one rank, and what all parts of a call use of it.

use super::call_state::{CallCounts, CallParts, CallRequests, CallTransfers, CallWeights};
use super::groups::{Groups, Mesh};
use super::in_flight::Request;
use super::passes::{SHADOWED, SHARDED};
use super::plan_part::PartCall;
use super::rows::{RowMesh, RowRange, Rows};
use super::transfers::transfers;
use crate::error::EngineError;
use crate::memory::Buffers;
use crate::reason::WeightReason;
use moesaic_collectives::schedules::{GroupRank, Schedule};
use moesaic_collectives::{Call, Collectives, Transfer};
use moesaic_dist::OpGroup;
use moesaic_plan::{self as plan, RankPlan, TensorId, TensorPlan};
use moesaic_target::{Buffer, RowCopy};
use std::sync::{Arc, MutexGuard};

/// A call of one rank. It holds the locks of the mesh's groups and of all parts until it is
/// dropped.
pub(super) struct MeshCall<'l> {
    pub mesh: &'l Mesh,
    pub plan: &'l RankPlan,
    /// The name of the layer in exchanges.
    pub label: &'l str,
    pub groups: MutexGuard<'l, Groups>,
    pub parts: CallParts<'l>,
    pub counts: CallCounts,
    pub weights: CallWeights<'l>,
    /// Declared before the casts, so that exchanges end before the memory of cast rows is free.
    pub requests: CallRequests<'l>,
    pub transfers: CallTransfers<'l>,
}

/// A buffer and a byte offset in it.
#[derive(Clone, Copy)]
pub(super) struct Bytes<'b> {
    buffer: &'b Arc<Buffer>,
    offset: usize,
}

impl<'b> Bytes<'b> {
    pub fn at(buffer: &'b Arc<Buffer>, offset: usize) -> Bytes<'b> {
        Bytes { buffer, offset }
    }
}

impl<'l> MeshCall<'l> {
    pub(super) fn part(&self, part: plan::PlanPart) -> &PartCall<'_> {
        match part {
            plan::PlanPart::Dispatch => &self.parts.tokens,
            plan::PlanPart::Experts => &self.parts.experts,
            plan::PlanPart::Shadows => self.parts.shadows.as_ref().expect(SHADOWED),
            plan::PlanPart::Shared => self.parts.shared.as_ref().expect(SHARDED),
        }
    }

    pub(super) fn call(&self, name: &str) -> Call {
        // In one allocation: a label is made for each exchange of each call.
        let label = [name, " of ", self.label].concat();
        Call {
            label,
            ..Call::default()
        }
    }

    /// Returns the communicator of a process group at the call's adaptive parallelism degree.
    pub(super) fn group(&mut self, group: OpGroup) -> &mut dyn Collectives {
        self.groups.group(group, self.plan.adaptive_r)
    }

    /// Returns the mesh in which rows are exchanged and this rank's coordinates there.
    pub(super) fn row_mesh(&self) -> RowMesh {
        let by = self.plan.by();
        RowMesh {
            mesh: by.mesh(),
            place: by.place(self.mesh.rank()),
        }
    }

    /// Returns this rank's index among them.
    pub(super) fn own_member(&self) -> usize {
        let RowMesh { mesh, place } = self.row_mesh();
        place.ep * mesh.expert_tp + place.tp
    }

    pub(super) fn rows(&self) -> &Rows {
        self.counts
            .rows
            .as_ref()
            .expect("rows are counted before they go")
    }

    pub fn send(
        &mut self,
        group: OpGroup,
        sends: &[Transfer],
        receives: &[Transfer],
        call: &Call,
    ) -> Result<Request, EngineError> {
        let group = self.group(group);
        let handle = group.exchange(sends, receives, call)?;
        Ok(Request::sending(handle, group.rank(), sends))
    }

    /// Exchanges by a schedule, or directly without one.
    pub(super) fn send_by(
        &mut self,
        path: Option<Box<dyn Schedule>>,
        sends: &[Transfer],
        receives: &[Transfer],
        call: &Call,
    ) -> Result<Request, EngineError> {
        let Some(path) = path else {
            return self.send(OpGroup::Ep, sends, receives, call);
        };
        let recorded = self.requests.recorder.is_some();
        let group = self.group(OpGroup::Ep);
        let handle = group.exchange_with(sends, receives, &*path, call)?;
        let own = GroupRank {
            rank: group.rank(),
            size: group.size(),
        };
        let mut request = Request::sending(handle, own.rank, sends);
        // Making the plan again is worth it for a recorder alone.
        if recorded {
            request.bytes = sent_by(&*path, own, sends, receives).unwrap_or(request.bytes);
        }
        Ok(request)
    }

    /// Returns transfers of a tensor's rows as bytes, because an exchange only moves them.
    pub(super) fn byte_transfers(
        &self,
        part: plan::PlanPart,
        tensor: TensorId,
        chunks: &[RowRange],
    ) -> Result<Vec<Transfer>, EngineError> {
        let bytes = self.plan.row_bytes(part, tensor);
        transfers(self.part(part).buffer(tensor), bytes, chunks)
    }

    /// Returns the buffer with this rank's part of a tensor of the expert part.
    pub(super) fn own<'b>(
        &self,
        tensor: TensorId,
        of: &'b Buffers,
    ) -> Result<&'b Arc<Buffer>, EngineError> {
        let TensorPlan { name, .. } = &self.plan.experts[tensor];
        let found = self.parts.owned.id(name).and_then(|id| of.handle(id));
        found.ok_or_else(|| EngineError::weight(name, WeightReason::NotGatherable))
    }

    pub(super) fn take_buffer(&mut self, bytes: usize) -> Result<Arc<Buffer>, EngineError> {
        self.groups
            .workspaces
            .take(&*self.parts.owned.device, bytes)
    }

    pub(super) fn copy_bytes(
        &self,
        from: Bytes<'_>,
        to: Bytes<'_>,
        bytes: usize,
    ) -> Result<(), EngineError> {
        let copy = RowCopy {
            from: from.buffer,
            from_offset: from.offset,
            from_stride: bytes,
            to: to.buffer,
            to_offset: to.offset,
            to_stride: bytes,
            rows: 1,
            row_bytes: bytes,
        };
        Ok(self.parts.owned.device.copy_rows(&copy)?)
    }
}

/// Returns the bytes that this rank sends by a schedule: fewer than its rows have where each goes
/// once, more where it passes rows on. `None` for messages that the schedule refuses.
fn sent_by(
    path: &dyn Schedule,
    own: GroupRank,
    sends: &[Transfer],
    receives: &[Transfer],
) -> Option<u64> {
    let sizes = |list: &[Transfer]| -> Vec<(usize, usize)> {
        let sizes = list.iter().map(|one| (one.peer, one.slice.bytes()));
        sizes.collect()
    };
    let plan = path.plan(own, &sizes(sends), &sizes(receives)).ok()?;
    Some(plan.bytes_to(|_| true) as u64)
}
