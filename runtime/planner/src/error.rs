//! Errors of predictions.

use crate::RoutingError;
use moesaic_plan::{PlanError, StrategyError};

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
