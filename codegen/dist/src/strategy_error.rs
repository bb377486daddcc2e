//! Errors of strategies on a mesh.

use crate::{AllToAll, Both, CommDtype, MAX_CHUNKS, Strategy};

/// A strategy that a mesh does not allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StrategyError {
    /// An adaptive parallelism degree that does not divide the shards.
    #[error(
        "rows cannot go to {adaptive_r} of {expert_tp} shards; take 0, where rows stay and weights are \
         gathered, or a divisor of {expert_tp}"
    )]
    AdaptiveMesh {
        /// The value that was asked for.
        adaptive_r: usize,
        /// The mesh's number.
        expert_tp: usize,
    },
    /// Weights are packed, so other ranks cannot gather them.
    #[error(
        "experts' weights are packed for a CPU, and other ranks cannot gather them so, as \
         `{strategy}` asks; make the layer on `Mesh::for_any_r`"
    )]
    Packed {
        /// The value that was asked for.
        strategy: Strategy,
    },
    /// No chunks, or too many.
    #[error("rows cannot travel in {overlap_degree} chunks; take 1 to {MAX_CHUNKS}")]
    Degree {
        /// The value that was asked for.
        overlap_degree: usize,
    },
    /// The nodes of a group do not allow the all-to-all algorithm.
    #[error(
        "all_to_all={all_to_all} needs the same number of consecutive ranks on each node, but \
         {reason}; start ranks so, or take all_to_all=linear"
    )]
    Nodes {
        /// The value that was asked for.
        all_to_all: AllToAll,
        /// The nodes of the ranks.
        reason: String,
    },
    /// Rows between ranks of one node would be cast, or rows between nodes would not.
    #[error(
        "all_to_all=dedup-ranks sends and sums rows in their own dtype, so comm_dtype={comm_dtype} \
         would change nothing; take comm_dtype=none, or all_to_all=dedup"
    )]
    UncastSums {
        /// The value that was asked for.
        comm_dtype: Both<CommDtype>,
    },
    /// Shadows need whole experts that rows go to.
    #[error(
        "shadows={shadows} needs whole experts that rows go to, and a layer in {expert_tp} shards \
         with rows to {adaptive_r} of them has none; make a mesh with expert_tp=1 and \
         leave out `r`, or take shadows=0"
    )]
    Shadows {
        /// The value that was asked for.
        shadows: usize,
        /// The mesh's number.
        expert_tp: usize,
        /// The number of shards that rows go to.
        adaptive_r: usize,
    },
    /// The chunks of forward and backward have too many common chunks.
    #[error(
        "{forward} chunks in forward and {backward} in backward are {chunks} chunks that both are \
         made of, and there may be {MAX_CHUNKS}; choose two of which one divides the other"
    )]
    Degrees {
        /// The value that was asked for.
        forward: usize,
        /// The value that was asked for.
        backward: usize,
        /// The least number of chunks that the chunks of both are made of.
        chunks: usize,
    },
}
