//! What is asked of the model, and what it answers.

use crate::exchange::LevelTime;
use crate::memory::Memory;
use crate::{Machine, Routing, RoutingError};
use moesaic_plan::{
    Parallel, Placement, PlanError, ShadowModel, Strategy, StrategyError, Training,
};
use moesaic_spec::LayerSpec;

/// A layer on a machine.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The layer.
    pub spec: LayerSpec,
    /// The machine, with its ranks a node.
    pub machine: Machine,
    /// Ranks of the job.
    pub world: usize,
    /// How the layer is trained, if it is: forward and backward are predicted then.
    pub training: Option<Training>,
    /// Rows of ranks for experts.
    pub routing: Routing,
    /// Which groups have which experts, for meshes of so many groups; `None`: in order.
    pub placement: Option<Placement>,
    /// By what experts with shadows are chosen, as the layer does it: [`ShadowModel::of`] if
    /// it was told no other.
    pub shadow_model: ShadowModel,
}

/// Something that cannot be predicted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlannerError {
    /// The layer or its mesh cannot be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The mesh cannot have this strategy.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// Rows that are not those of the layer's experts and the job's ranks.
    #[error(transparent)]
    Routing(#[from] RoutingError),
    /// A mesh of another size.
    #[error("the mesh has {wanted} ranks, the job {world}")]
    World {
        /// Of the mesh.
        wanted: usize,
        /// Of the job.
        world: usize,
    },
    /// A placement on groups of ranks that there cannot be.
    #[error("the placement is on {groups} groups of ranks, which {world} ranks cannot make")]
    Groups {
        /// Of the placement.
        groups: usize,
        /// Of the job.
        world: usize,
    },
    /// A all-to-all in two dimensions where there is one.
    #[error(
        "all_to_all={all_to_all} needs groups of ep x expert_tp ranks that fill several whole nodes; {group} \
         ranks with {per_node} a node do not\ntake all_to_all=linear, or another mesh"
    )]
    AllToAll {
        /// As asked for.
        all_to_all: String,
        /// Ranks of a group.
        group: usize,
        /// Of a node.
        per_node: usize,
    },
    /// Pieces that are not simulated.
    #[error(
        "overlap_by=peers with all_to_all={all_to_all} is not simulated; take all_to_all=linear, or overlap_by=rows"
    )]
    OverlapBy {
        /// As asked for.
        all_to_all: String,
    },
    /// No mesh at all.
    #[error("no mesh of {world} ranks fits this layer in {gib} GiB a rank")]
    Nothing {
        /// Ranks of the job.
        world: usize,
        /// Memory of a rank.
        gib: f64,
    },
}

/// What the model says of one configuration. Nothing of it is measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// How ranks share the layer.
    pub mesh: Parallel,
    /// How they carry out a pass.
    pub strategy: Strategy,
    /// Of a step: forward and, in training, backward and the sums of gradients over ranks,
    /// until the last rank is done.
    pub seconds: f64,
    /// The passes of a step.
    pub passes: Vec<PassTime>,
    /// Bytes of a rank in a step, by level: of the rank that sends most.
    pub sent: LevelTime,
    /// What a rank has to hold.
    pub memory: Memory,
    /// What the slowest rank spends most of its time on.
    pub bound: Bound,
    /// The part of the step which that is.
    pub bound_part: f64,
}

impl Prediction {
    /// Forward and backward, without the sums of gradients over ranks behind them.
    pub fn both_passes(&self) -> f64 {
        let passes = self.passes.iter().filter(|pass| pass.name != "gradients");
        passes.map(|pass| pass.seconds).sum()
    }
}

/// A pass.
#[derive(Clone, Debug, PartialEq)]
pub struct PassTime {
    /// `forward`, `backward` or `gradients`.
    pub name: &'static str,
    /// Until the last rank is done.
    pub seconds: f64,
    /// What the slowest rank does, in order; those of chunks are together. They overlap
    /// where rows comm in chunks. Empty where no detail was asked for.
    pub phases: Vec<PhaseOf>,
}

/// One thing that a rank does.
#[derive(Clone, Debug, PartialEq)]
pub struct PhaseOf {
    /// Of a launch its symbol, of an exchange its name.
    pub name: String,
    /// Whose launch (`tokens`, `experts`, `shared`), or `ranks` for an exchange.
    pub whose: &'static str,
    /// Seconds, of all chunks together.
    pub seconds: f64,
    /// Bytes that the rank sends, by level.
    pub sent: LevelTime,
}

/// What a time is spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Arithmetic of launches.
    Compute,
    /// Memory traffic of launches.
    Memory,
    /// Launches as such.
    Launches,
    /// Fixed times and messages of exchanges, whatever their size.
    Messages,
    /// Passes over memory that an exchange makes.
    Copies,
    /// Bytes over links of this level.
    Level(usize),
    /// Other ranks, for which it waits.
    Waiting,
}

/// One thing on a stream of a rank, from second to second.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulated {
    /// Which rank: of those that have the same to do the first.
    pub rank: usize,
    /// `compute` or `exchange`.
    pub stream: &'static str,
    /// What it is.
    pub name: String,
    /// Seconds since the step began.
    pub start: f64,
    /// Seconds since the step began.
    pub end: f64,
}
