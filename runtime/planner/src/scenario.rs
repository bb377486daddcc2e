//! The inputs and results of predictions.

use crate::exchange::LevelTime;
use crate::memory::MemoryUse;
use crate::{Machine, RoutedRows, RoutingError};
use moesaic_plan::{
    Parallel, Placement, PlanError, ShadowModel, Strategy, StrategyError, Training,
};
use moesaic_spec::LayerSpec;

/// A layer on a machine.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The layer.
    pub spec: LayerSpec,
    /// The machine, with its ranks per node.
    pub machine: Machine,
    /// The ranks of the job.
    pub world: usize,
    /// The training setup, if the layer is trained; forward and backward are predicted then.
    pub training: Option<Training>,
    /// The rows of ranks for experts.
    pub routing: RoutedRows,
    /// The experts of each group, for meshes with as many groups; `None` places experts in order.
    pub placement: Option<Placement>,
    /// The model that chooses experts with shadows, as the layer does; [`ShadowModel::of`] by
    /// default.
    pub shadow_model: ShadowModel,
}

/// A configuration that cannot be predicted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlannerError {
    /// The layer or its mesh cannot be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The mesh cannot run this strategy.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// The rows do not match the layer's experts and the job's ranks.
    #[error(transparent)]
    Routing(#[from] RoutingError),
    /// The mesh has another number of ranks.
    #[error("the mesh has {wanted} ranks, the job {world}")]
    World {
        /// The ranks of the mesh.
        wanted: usize,
        /// The ranks of the job.
        world: usize,
    },
    /// The machine is too small.
    #[error("machine {machine} has at most {most} ranks, the job {world}")]
    Ranks {
        /// The machine's name.
        machine: String,
        /// The ranks of the machine.
        most: usize,
        /// The ranks of the job.
        world: usize,
    },
    /// The placement needs groups of ranks that the job cannot form.
    #[error("the placement is on {groups} groups of ranks, which {world} ranks cannot make")]
    Groups {
        /// The groups of the placement.
        groups: usize,
        /// The ranks of the job.
        world: usize,
    },
    /// A two-dimensional all-to-all on a mesh without whole nodes.
    #[error(
        "all_to_all={all_to_all} needs groups of ep x expert_tp ranks that fill several whole nodes; {group} \
         ranks with {per_node} a node do not\ntake all_to_all=linear, or another mesh"
    )]
    AllToAll {
        /// The requested algorithm.
        all_to_all: String,
        /// The ranks of a group.
        group: usize,
        /// The ranks of a node.
        per_node: usize,
    },
    /// Chunks that are not simulated.
    #[error(
        "overlap_by=peers with all_to_all={all_to_all} is not simulated; take all_to_all=linear, or overlap_by=rows"
    )]
    OverlapBy {
        /// The requested algorithm.
        all_to_all: String,
    },
    /// No mesh fits.
    #[error("no mesh of {world} ranks fits this layer in {gib} GiB a rank")]
    Nothing {
        /// The ranks of the job.
        world: usize,
        /// The memory of a rank.
        gib: f64,
    },
}

/// The model's prediction of one configuration. Nothing in it is measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// The mesh.
    pub mesh: Parallel,
    /// The strategy.
    pub strategy: Strategy,
    /// The seconds of a step: forward and, in training, backward and the sums of gradients over
    /// ranks, until the last rank is done.
    pub seconds: f64,
    /// The passes of a step.
    pub passes: Vec<PassEstimate>,
    /// The bytes that a rank sends in a step, by level: those of the rank that sends most.
    pub sent: LevelTime,
    /// The memory of a rank.
    pub memory: MemoryUse,
    /// The bottleneck of the slowest rank.
    pub bound: Bottleneck,
    /// The fraction of the step that the bottleneck takes.
    pub bound_part: f64,
}

impl Prediction {
    /// Returns the seconds of forward and backward, without the sums of gradients that follow.
    pub fn both_passes(&self) -> f64 {
        let passes = self.passes.iter().filter(|pass| pass.name != "gradients");
        passes.map(|pass| pass.seconds).sum()
    }
}

/// The time of a pass.
#[derive(Clone, Debug, PartialEq)]
pub struct PassEstimate {
    /// `forward`, `backward` or `gradients`.
    pub name: &'static str,
    /// The seconds until the last rank is done.
    pub seconds: f64,
    /// The phases of the slowest rank, in order; those of chunks are merged. They overlap where
    /// rows are exchanged in chunks. Empty unless details were requested.
    pub phases: Vec<PhaseOf>,
}

/// One phase of a rank.
#[derive(Clone, Debug, PartialEq)]
pub struct PhaseOf {
    /// The symbol of a launch, or the name of an exchange.
    pub name: String,
    /// The part of a launch (`tokens`, `experts`, `shared`), or `ranks` for an exchange.
    pub whose: &'static str,
    /// The seconds, of all chunks together.
    pub seconds: f64,
    /// The bytes that the rank sends, by level.
    pub sent: LevelTime,
}

/// A bottleneck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    /// The arithmetic of launches.
    Compute,
    /// The memory traffic of launches.
    Memory,
    /// The fixed times of launches.
    Launches,
    /// The fixed times and per-message times of exchanges.
    Messages,
    /// The passes over memory of an exchange.
    Copies,
    /// The bytes over links of this level.
    Level(usize),
    /// Waiting for other ranks.
    Waiting,
}

/// An entry on the timeline of a rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulated {
    /// The rank: the first of those with equal work.
    pub rank: usize,
    /// `compute` or `exchange`.
    pub stream: &'static str,
    /// The name.
    pub name: String,
    /// The start, in seconds since the step began.
    pub start: f64,
    /// The end, in seconds since the step began.
    pub end: f64,
}
