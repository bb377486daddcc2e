//! Plans of kernels, from a layer spec: the computation and tiling of each kernel, its parameters,
//! and the order of launches.
//!
//! ```text
//! LayerSpec ──ops──> desc ──tiling on a Machine──> Op { desc, config } ──> [Entry]
//!      └─────────────layer──> [TensorPlan] + [Step]
//! ```
//!
//! Everything is plain data and every function is pure: the same spec and target give the same
//! plan.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without notice.

mod caches;
mod layer;
mod mesh;
mod ops;
mod tilings;
mod tuning;
mod work;

pub use caches::CacheClass;
pub use layer::{
    EntryId, LaunchStep, LayerPlan, PlanOptions, Recompute, Step, TensorId, TensorPlan, TensorRole,
    Training, plan,
};
pub use layer::{UserPlan, plan_user_experts, stacked};
pub use mesh::{
    CastLane, CastRows, Exchange, FromTo, Packed, PartTensor, RankPlan, RankStep, RowCasts,
    SATURATED,
};
pub use mesh::{ShardRegion, Sharing, experts_of, plan_rank, shared_shards};
pub use moesaic_dist::{ALL_TO_ALLS, AllToAllRow};
pub use moesaic_dist::{AdaptiveMesh, MeshError, Parallel, RankCoords, SharedExperts, TokenScope};
pub use moesaic_dist::{
    AllToAll, Both, CommDtype, MAX_CHUNKS, ParseStrategyError, PlanForm, Strategy, StrategyError,
};
pub use moesaic_dist::{Balancer, Balancing, ExpertSlot, Kept, Move, Moves, moves, moves_from};
pub use moesaic_dist::{Chunk, Distance, Overlap, OverlapBy};
pub use moesaic_dist::{CollectiveOp, Payload, PlanPart, Sent};
pub use moesaic_dist::{Eplb, Replication, balanced, rebalance};
pub use moesaic_dist::{Placement, PlacementError, RowSource, Split};
pub use moesaic_dist::{ShadowForm, ShadowModel, shadows};
pub use ops::*;
pub use tilings::Tilings;
pub use tuning::{Knob, KnobCandidates, Tuning};
pub use work::{Bound, Floor, MemoryLevel, Roofs, Work};

use moesaic_kernel::{Entry, Stem};
use serde::{Deserialize, Serialize};

/// One kernel source to emit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelPlan {
    /// A readable name, unique within the layer: `grouped_gemm_up`.
    pub name: String,
    /// The desc and config.
    #[serde(flatten)]
    pub op: Op,
    /// The functions it exports and how each is launched.
    pub entries: Vec<Entry>,
}

impl KernelPlan {
    /// Returns the operator it belongs to.
    pub fn stem(&self) -> Stem {
        self.op.stem()
    }

    /// Returns the family of a GEMM, such as `mma`; `None` for other kernels.
    pub fn family(&self) -> Option<&'static str> {
        Some(self.op.gemm()?.family.name())
    }
}

/// A valid spec that cannot be planned.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// An option of experts that are the caller's, who computes it.
    #[error("`{option}` is inside experts, and those are the caller's\n{advice}")]
    Unsupported {
        /// The option as the spec spells it.
        option: &'static str,
        /// Advice on what is possible instead.
        advice: &'static str,
    },
    /// Quantized activations of experts where the layer cannot have them.
    #[error(
        "`precision.expert_activations` = {format} {reason}\n\
         leave the key out to multiply activations as they are"
    )]
    QuantizedActivations {
        /// The codes.
        format: moesaic_spec::ActivationFormat,
        /// The reason.
        reason: String,
    },
    /// A mesh of ranks that the layer cannot have.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// A strategy that its mesh cannot have.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// Experts placed as its mesh cannot have them.
    #[error(transparent)]
    Placement(#[from] PlacementError),
}
