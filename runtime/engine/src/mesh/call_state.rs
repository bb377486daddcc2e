//! The data of one call of one rank, by duty.

use super::all_to_all::RowSchedule;
use super::comm_cast::CastCall;
use super::in_flight::InFlight;
use super::plan_part::PartCall;
use super::routing::Routing;
use super::rows::{OwnRows, Rows};
use super::shadow_weights::{IdleWeights, ShadowWeights};
use super::tp_peers::TpPeers;
use crate::device_layer::DeviceLayer;
use crate::trace::Recorder;
use moesaic_plan::{ShadowModel, TensorId};
use moesaic_target::Buffer;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The parts of the plan in a call.
pub(super) struct CallParts<'l> {
    pub tokens: PartCall<'l>,
    pub experts: PartCall<'l>,
    /// The layer with the weights that this rank owns; another one than the expert part's where
    /// weights are gathered.
    pub owned: &'l DeviceLayer,
    /// The shadow part, where experts may have shadows.
    pub shadows: Option<PartCall<'l>>,
    /// The shared-expert part, where shared experts are sharded.
    pub shared: Option<PartCall<'l>>,
}

/// The ranks that rows go to, as far as the call has learned them.
#[derive(Default)]
pub(super) struct CallCounts {
    /// The decision of routing the tokens of all ranks together, where the call needs it.
    pub routing: Option<Arc<Routing>>,
    /// Rows of this rank's tokens, known after the scan.
    pub own: Arc<OwnRows>,
    pub rows: Option<Rows>,
    pub tp_peers: Option<TpPeers>,
}

/// The weights of shadows.
pub(super) struct CallWeights<'l> {
    /// The model that chooses shadows.
    pub model: &'l ShadowModel,
    /// The memory for weights of shadows in a pass that trains.
    pub idle_weights: Option<&'l Arc<IdleWeights>>,
    /// Weights of shadows that stay for backward.
    pub shadow_weights: Option<ShadowWeights>,
}

/// How rows go, and the tensors that go.
pub(super) struct CallTransfers<'l> {
    /// The all-to-all schedule; backward uses forward's.
    pub row_schedule: RowSchedule,
    /// The cast kernels, where rows are cast for other nodes.
    pub cast: Option<CastCall<'l>>,
    /// The tensors of the dispatch part that exchanges move.
    pub exchanged: &'l BTreeSet<TensorId>,
    /// The caller's memory for these tensors, in a raw call.
    pub caller: CallerTensors,
}

/// The caller's memory for tensors of the dispatch part that kernels use in the layer's memory.
#[derive(Default)]
pub(super) struct CallerTensors {
    pub tensors: Vec<(TensorId, Arc<Buffer>)>,
    /// The caller's memory for [`SATURATED`](moesaic_plan::SATURATED), which is no tensor of the
    /// layer.
    pub saturated: Option<Arc<Buffer>>,
}

/// Exchanges in flight, and who records them.
pub(super) struct CallRequests<'l> {
    /// Exchanges that nobody has waited for yet, in their order.
    pub in_flight: Vec<InFlight>,
    /// The recorder of exchanges.
    pub recorder: Option<&'l dyn Recorder>,
}
