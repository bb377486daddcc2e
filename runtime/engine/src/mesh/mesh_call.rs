//! The state of one call of one rank, and what all parts of a call use of it.

use super::all_to_all::RowSchedule;
use super::comm_cast::CastCall;
use super::groups::{Groups, Mesh};
use super::in_flight::{InFlight, Request};
use super::passes::{SHADOWED, SHARDED};
use super::plan_part::PartCall;
use super::routing::Routing;
use super::rows::{OwnRows, RowMesh, RowRange, Rows};
use super::shadow_weights::{IdleWeights, ShadowWeights};
use super::tp_peers::TpPeers;
use super::transfers::transfers;
use crate::device_layer::DeviceLayer;
use crate::error::EngineError;
use crate::memory::Buffers;
use crate::trace::Recorder;
use moesaic_collectives::plan::Schedule;
use moesaic_collectives::{Call, Collectives, Transfer};
use moesaic_dist::OpGroup;
use moesaic_plan::{self as plan, RankPlan, ShadowModel, TensorId, TensorPlan};
use moesaic_target::{Buffer, RowCopy};
use std::collections::BTreeSet;
use std::sync::{Arc, MutexGuard};

/// A call of one rank. It holds the locks of the mesh's groups and of all parts until it is
/// dropped.
pub(super) struct MeshCall<'l> {
    pub mesh: &'l Mesh,
    pub plan: &'l RankPlan,
    /// The name of the layer, for errors of exchanges.
    pub label: &'l str,
    /// The all-to-all schedule; backward uses forward's.
    pub row_schedule: RowSchedule,
    pub groups: MutexGuard<'l, Groups>,
    pub tokens: PartCall<'l>,
    pub experts: PartCall<'l>,
    /// The layer with the weights that this rank owns; another one than the expert part's where
    /// weights are gathered.
    pub owned: &'l DeviceLayer,
    /// The shadow part, where experts may have shadows.
    pub shadows: Option<PartCall<'l>>,
    /// The model that chooses shadows.
    pub model: &'l ShadowModel,
    /// The memory for weights of shadows in a pass that trains.
    pub idle_weights: Option<&'l Arc<IdleWeights>>,
    /// Weights of shadows that stay for backward.
    pub shadow_weights: Option<ShadowWeights>,
    /// The shared-expert part, where shared experts are sharded.
    pub shared: Option<PartCall<'l>>,
    /// The decision of routing the tokens of all ranks together, where the call needs it.
    pub routing: Option<Arc<Routing>>,
    /// Rows of this rank's tokens, known after the scan.
    pub own: Arc<OwnRows>,
    pub rows: Option<Rows>,
    pub tp_peers: Option<TpPeers>,
    /// The tensors of the dispatch part that exchanges move.
    pub exchanged: &'l BTreeSet<TensorId>,
    /// The caller's memory for these tensors, in a raw call.
    pub caller: CallerTensors,
    /// Exchanges that nobody has waited for yet, in their order.
    pub in_flight: Vec<InFlight>,
    /// The cast kernels, where rows are cast for other nodes.
    pub cast: Option<CastCall<'l>>,
    /// The recorder of exchanges.
    pub recorder: Option<&'l dyn Recorder>,
}

/// The caller's memory for tensors of the dispatch part that kernels use in the layer's memory.
#[derive(Default)]
pub(super) struct CallerTensors {
    pub tensors: Vec<(TensorId, Arc<Buffer>)>,
    /// The caller's memory for [`SATURATED`], which is no tensor of the layer.
    pub saturated: Option<Arc<Buffer>>,
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
            plan::PlanPart::Dispatch => &self.tokens,
            plan::PlanPart::Experts => &self.experts,
            plan::PlanPart::Shadows => self.shadows.as_ref().expect(SHADOWED),
            plan::PlanPart::Shared => self.shared.as_ref().expect(SHARDED),
        }
    }

    pub(super) fn call(&self, name: &str) -> Call {
        Call::new(&format!("{} of {}", name, self.label))
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
        self.rows.as_ref().expect("rows are counted before they go")
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
        Ok(Request::sending(handle, sends))
    }

    /// Exchanges by a schedule, or directly without one.
    pub(super) fn send_by(
        &mut self,
        path: Option<Box<dyn Schedule>>,
        sends: &[Transfer],
        receives: &[Transfer],
        call: &Call,
    ) -> Result<Request, EngineError> {
        let group = self.group(OpGroup::Ep);
        let handle = match path {
            None => group.exchange(sends, receives, call)?,
            Some(path) => group.exchange_with(sends, receives, &*path, call)?,
        };
        Ok(Request::sending(handle, sends))
    }

    /// Returns transfers of a tensor's rows as bytes, because an exchange only moves them.
    pub(super) fn transfers(
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
        let found = self.owned.id(name).and_then(|id| of.handle(id));
        found.ok_or_else(|| EngineError::Weight {
            name: name.clone(),
            problem: "is not on the device as other ranks could gather it".to_string(),
        })
    }

    pub(super) fn take_buffer(&mut self, bytes: usize) -> Result<Arc<Buffer>, EngineError> {
        self.groups.workspaces.take(&*self.owned.device, bytes)
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
        Ok(self.owned.device.copy_rows(&copy)?)
    }
}
