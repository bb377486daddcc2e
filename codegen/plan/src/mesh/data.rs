//! The plan of one rank, as data.

use super::{Chunk, Packed, Parallel, RankCoords, TokenScope};
use crate::{LayerPlan, Placement, Step, TensorId};
use serde::{Deserialize, Serialize};

/// The plan of one rank: a layer plan for each part and the steps of each pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankPlan {
    /// The mesh by which ranks share the layer.
    pub mesh: Parallel,
    /// The coordinates of this rank.
    pub place: RankCoords,
    /// The experts of each group; `None` means contiguous ranges, as in [`Parallel::experts`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// The adaptive parallelism degree: the number of shards of its expert that a row goes to; 0
    /// where rows stay. If it is less than the number of shards that weights are stored in, the
    /// expert part multiplies with gathered weights ([`CollectiveOp::AllGatherWeight`]).
    pub adaptive_r: usize,
    /// The dispatch part: the layer without its experts, for this rank's tokens.
    pub tokens: LayerPlan,
    /// The expert part: this rank's experts, for the rows that arrive. Its tokens are rows.
    pub experts: LayerPlan,
    /// The shadow part: up to as many shadowed experts as the strategy allows, for rows that stay
    /// on this rank. Its tokens are those rows. `None` where there are no shadows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadows: Option<LayerPlan>,
    /// The shared-expert part: this rank's shards of shared experts, for the tokens of all ranks
    /// that hold shards of the same experts. `None` where shared experts are whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<LayerPlan>,
    /// The tokens that losses, capacities and selections look at.
    #[serde(default, skip_serializing_if = "TokenScope::is_rank")]
    pub scope: TokenScope,
    /// The kernels that cast rows for other nodes and back ([`RankPlan::in_comm_dtype`]). Its
    /// tokens are such rows. `None` where rows travel as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comm_cast: Option<LayerPlan>,
    /// The steps of a forward pass; of a training one if the plan has a backward pass.
    pub steps: Vec<RankStep>,
    /// The steps of an evaluation, if `steps` trains.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evaluation: Vec<RankStep>,
    /// The steps of a backward pass.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backward: Vec<RankStep>,
}

/// A part of a rank's plan: the layer plan that a tensor or kernel belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlanPart {
    /// [`RankPlan::tokens`].
    Dispatch,
    /// [`RankPlan::experts`].
    Experts,
    /// [`RankPlan::shadows`].
    Shadows,
    /// [`RankPlan::shared`].
    Shared,
}

/// The name of [`RankPlan::comm_cast`] in texts and traces.
pub(super) const NODES: &str = "nodes";

impl PlanPart {
    /// Returns the name of the part.
    pub fn name(self) -> &'static str {
        match self {
            PlanPart::Dispatch => "dispatch",
            PlanPart::Experts => "experts",
            PlanPart::Shadows => "shadows",
            PlanPart::Shared => "shared",
        }
    }
}

/// One step of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RankStep {
    /// A launch: a step of the same pass of a part's plan.
    Launch {
        /// The part whose plan has the step.
        part: PlanPart,
        /// The index of the step in the part's pass.
        step: usize,
        /// The chunk of rows, where rows come in chunks.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        chunk: Option<Chunk>,
    },
    /// An exchange between ranks.
    Exchange(Exchange),
}

impl RankStep {
    /// Returns the exchange, if the step is one.
    pub fn exchange(&self) -> Option<&Exchange> {
        match self {
            RankStep::Exchange(exchange) => Some(exchange),
            RankStep::Launch { .. } => None,
        }
    }

    /// Returns whether both steps are exchanges that [go together](Exchange::goes_with).
    pub fn goes_with(&self, other: &RankStep) -> bool {
        let both = self.exchange().zip(other.exchange());
        both.is_some_and(|(one, other)| one.goes_with(other))
    }
}

/// One exchange between ranks. Its sizes follow from counts: see [`RankPlan::bytes`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exchange {
    /// The name in errors and traces, such as `rows`.
    pub name: String,
    /// The operation.
    #[serde(flatten)]
    pub op: CollectiveOp,
    /// The cast of rows between nodes; `None` where they travel as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packed: Option<Packed>,
    /// The chunk of rows, where rows come in chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunk: Option<Chunk>,
}

impl Exchange {
    /// Returns whether this exchange moves rows of the same tokens between the same ranks as
    /// `other`, so that both can be one operation.
    pub fn goes_with(&self, other: &Exchange) -> bool {
        let alike = match self.op {
            CollectiveOp::Dispatch { .. } => matches!(other.op, CollectiveOp::Dispatch { .. }),
            CollectiveOp::Combine { .. } => matches!(other.op, CollectiveOp::Combine { .. }),
            _ => false,
        };
        alike && self.chunk == other.chunk
    }
}

/// A collective operation of a rank's pass. The operation's name says which part each tensor
/// belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum CollectiveOp {
    /// Every rank learns how many tokens each rank has, before anything else. The capacity of all
    /// ranks is that of the rank with the most tokens, and the number of a rank's first token is
    /// the sum of the counts before it.
    TokenCounts,
    /// Every rank of a group learns how many rows each rank has for every expert. The choice of
    /// shadowed experts follows from these counts.
    TokensPerExpert,
    /// Every rank of a group learns how many rows it gets for each of its experts from each rank;
    /// `offsets` and `row_tiles` of the expert part follow from these counts.
    RowCounts,
    /// Rows go to the ranks of their experts, to every shard of an expert.
    Dispatch {
        /// Rows of the dispatch part, by expert.
        from: TensorId,
        /// Rows of the expert part, by expert, then by rank.
        to: TensorId,
    },
    /// Rows go back to the ranks they received from.
    Combine {
        /// Rows of the expert part, by expert, then by rank.
        from: TensorId,
        /// Rows of the dispatch part, by expert.
        to: TensorId,
    },
    /// Rows of shadowed experts stay on this rank: they are copied to the shadow part.
    KeepShadowRows {
        /// Rows of the dispatch part, by expert.
        from: TensorId,
        /// Rows of the shadow part, by expert.
        to: TensorId,
    },
    /// Rows of the shadow part are copied back to the dispatch part.
    ReturnShadowRows {
        /// Rows of the shadow part, by expert.
        from: TensorId,
        /// Rows of the dispatch part, by expert.
        to: TensorId,
    },
    /// A weight of each shadowed expert goes from its owner to all groups.
    BroadcastShadowWeight {
        /// A tensor of the expert part.
        from: TensorId,
        /// A tensor of the shadow part.
        to: TensorId,
    },
    /// Gradients of a shadowed weight are summed over the groups; the owner gets the sum.
    ReduceShadowGradient {
        /// A tensor of the shadow part.
        from: TensorId,
        /// A tensor of the expert part.
        to: TensorId,
    },
    /// A tensor of the expert part is summed over the shards of the experts.
    AllReduceTp {
        /// A tensor of the expert part; each shard has the sum afterwards.
        tensor: TensorId,
    },
    /// TP peers, which hold shards of the same experts, learn how many tokens each has.
    TpTokenCounts,
    /// Rows of this rank's tokens go to all TP peers.
    AllGatherTp {
        /// Rows of the dispatch part, by token.
        from: TensorId,
        /// Rows of the shared-expert part, by rank, then by token.
        to: TensorId,
    },
    /// A tensor of the shared-expert part is summed over the shards; each rank gets the rows of its
    /// own tokens.
    ReduceScatterTp {
        /// Rows of the shared-expert part, by rank, then by token.
        from: TensorId,
        /// Rows of the dispatch part, by token.
        to: TensorId,
    },
    /// A weight of shared experts that the first shard holds goes to all shards.
    BroadcastTp {
        /// A tensor of the shared-expert part.
        from: TensorId,
        /// A tensor of the dispatch part.
        to: TensorId,
    },
    /// A tensor of the dispatch part is summed over all ranks.
    AllReduceSum {
        /// A tensor of the dispatch part.
        from: TensorId,
        /// A tensor of the dispatch part.
        to: TensorId,
    },
    /// The tokens of all ranks that have at least one expert are counted.
    CountLiveTokens {
        /// `topk_ids` of the dispatch part.
        ids: TensorId,
        /// The count, on the dispatch part.
        to: TensorId,
    },
    /// Every rank gets the maximum over all ranks.
    AllReduceMax {
        /// A tensor of the dispatch part; every rank has the maximum afterwards.
        tensor: TensorId,
    },
    /// The slots of this rank's tokens are placed as routing the tokens of all ranks together
    /// decided, where a call needs that.
    GlobalRouting,
    /// The loss terms of each tile of this rank's tokens are summed over all tiles of all ranks.
    /// The sum goes to the first tile; the other tiles get zeros.
    ReduceLossParts {
        /// A tensor of the dispatch part with a row for each tile.
        tensor: TensorId,
    },
    /// The ranks of a block gather the parts of a weight that each owns: an all-gather into the
    /// weight of the expert part.
    AllGatherWeight {
        /// A tensor of the expert part.
        weight: TensorId,
        /// The dimension that shards split; `None` if they do not split it.
        dim: Option<usize>,
    },
    /// Gradients of a weight of the expert part are summed over the ranks of a block; each rank
    /// gets the part that it owns.
    ReduceScatterGradient {
        /// A tensor of the expert part.
        gradient: TensorId,
        /// The dimension that shards split; `None` if they do not split it.
        dim: Option<usize>,
    },
    /// Weights of the experts of each group, as its first shard holds them, go to all ranks.
    AllGatherExperts {
        /// A tensor of the expert part.
        from: TensorId,
        /// A tensor of the dispatch part.
        to: TensorId,
    },
}

impl RankPlan {
    /// Returns whether weights of shadows stay from a forward pass to its backward pass, which then
    /// sends none.
    pub fn keeps_shadow_weights(&self) -> bool {
        // Read off the steps, so that the runtime cannot free weights that a step still reads.
        let mut exchanges = self.backward.iter().filter_map(RankStep::exchange);
        !exchanges.any(|exchange| matches!(exchange.op, CollectiveOp::BroadcastShadowWeight { .. }))
    }

    /// Returns the steps of a pass that draws nothing and keeps nothing.
    pub fn evaluation_steps(&self) -> &[RankStep] {
        match self.tokens.training {
            Some(_) => &self.evaluation,
            None => &self.steps,
        }
    }

    /// Returns the steps of a forward pass that route tokens: the exchanges that routing depends
    /// on, and gate and scan of this rank's tokens. `of` are the steps of the same pass of
    /// [`RankPlan::tokens`].
    pub fn routing_of(&self, steps: &[RankStep], of: &[Step]) -> Vec<RankStep> {
        let scanned = self.tokens.routing_of(of).len();
        let decides = |step: &&RankStep| match step {
            RankStep::Launch { part, step, .. } => *part == PlanPart::Dispatch && *step < scanned,
            RankStep::Exchange(Exchange { op, .. }) => {
                matches!(
                    op,
                    CollectiveOp::TokenCounts
                        | CollectiveOp::AllReduceMax { .. }
                        | CollectiveOp::GlobalRouting
                )
            }
        };
        steps.iter().filter(decides).cloned().collect()
    }

    /// Returns the plan of a part.
    ///
    /// # Panics
    /// Panics for shared experts that are whole and for shadows that the plan does not have: no
    /// step names these parts.
    pub fn part(&self, part: PlanPart) -> &LayerPlan {
        match part {
            PlanPart::Dispatch => &self.tokens,
            PlanPart::Experts => &self.experts,
            PlanPart::Shadows => {
                let shadows = self.shadows.as_ref();
                shadows.expect("steps of shadows are of plans with shadows")
            }
            PlanPart::Shared => {
                let shared = self.shared.as_ref();
                shared.expect("steps of shared experts are of ranks with shards of them")
            }
        }
    }

    /// Returns the plan of every part that exists.
    pub fn parts(&self) -> impl Iterator<Item = &LayerPlan> {
        self.named_parts().map(|(_, part)| part)
    }

    /// Returns every part that exists with its name in [`RankPlan::text`].
    pub fn named_parts(&self) -> impl Iterator<Item = (&'static str, &LayerPlan)> {
        let named = |part: PlanPart, plan| (part.name(), plan);
        [
            Some(named(PlanPart::Dispatch, &self.tokens)),
            Some(named(PlanPart::Experts, &self.experts)),
            (self.shadows.as_ref()).map(|plan| named(PlanPart::Shadows, plan)),
            (self.shared.as_ref()).map(|plan| named(PlanPart::Shared, plan)),
            self.comm_cast.as_ref().map(|plan| (NODES, plan)),
        ]
        .into_iter()
        .flatten()
    }

    /// Returns the bytes of one row of a tensor.
    pub fn row_bytes(&self, part: PlanPart, tensor: TensorId) -> usize {
        let tensor = &self.part(part)[tensor];
        let width: u64 = tensor
            .shape
            .iter()
            .skip(1)
            // Only the first size depends on the number of tokens.
            .map(|size| size.eval(0))
            .product();
        width as usize * tensor.dtype.size()
    }

    /// Returns the placement of experts on groups.
    pub fn placement(&self) -> Placement {
        let contiguous = || Placement::contiguous(self.mesh.ep, self.tokens.spec.shape.experts);
        self.placement.clone().unwrap_or_else(contiguous)
    }

    /// Returns the experts that this rank holds, in the order in which it holds them.
    pub fn own_experts(&self) -> Vec<usize> {
        self.placement().of(self.place.ep).into_owned()
    }
}
