//! What one rank does, as data.

use super::{Chunk, Packed, Parallel, RankCoords, TokenScope};
use crate::{LayerPlan, Placement, Step, TensorId};
use serde::{Deserialize, Serialize};

/// What one rank does in each pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankPlan {
    /// How ranks share the layer.
    pub mesh: Parallel,
    /// Which of them this is.
    pub place: RankCoords,
    /// Which groups have which experts; `None`: as [`Parallel::experts`] says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// To how many shards of its expert a row goes; 0 where rows stay. Fewer than weights
    /// have: the expert part has weights that are gathered ([`CollectiveOp::AllGatherWeight`]).
    pub adaptive_r: usize,
    /// What is done with this rank's tokens.
    pub tokens: LayerPlan,
    /// What this rank's experts do with the rows that arrive. Its tokens are rows.
    pub experts: LayerPlan,
    /// What this rank does with rows of experts that have shadows in a call, with as many
    /// experts as there may be. Its tokens are rows that stay. `None` where there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadows: Option<LayerPlan>,
    /// What this rank's shards of shared experts do with the tokens of all ranks that have
    /// shards of the same experts; `None` where shared experts are whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<LayerPlan>,
    /// Whose tokens losses, capacities and selections look at.
    #[serde(default, skip_serializing_if = "TokenScope::is_rank")]
    pub scope: TokenScope,
    /// What is done with rows that go to other nodes or come from there, where they are packed
    /// for that ([`RankPlan::in_comm_dtype`]). Its tokens are such rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comm_cast: Option<LayerPlan>,
    /// The steps of a forward pass: of one that trains, where there is a backward pass.
    pub steps: Vec<RankStep>,
    /// The steps of an evaluation, where `steps` trains.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evaluation: Vec<RankStep>,
    /// The steps of a backward pass.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backward: Vec<RankStep>,
}

/// Whose tensors and kernels.
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

/// What launches of [`RankPlan::comm_cast`] are called.
pub(super) const NODES: &str = "nodes";

impl PlanPart {
    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            PlanPart::Dispatch => "dispatch",
            PlanPart::Experts => "experts",
            PlanPart::Shadows => "shadows",
            PlanPart::Shared => "shared",
        }
    }
}

/// One thing that a rank does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RankStep {
    /// A step of the pass of the same name of a part's plan, by its number.
    Launch {
        /// Whose.
        part: PlanPart,
        /// Which.
        step: usize,
        /// For which rows, where they come in chunks.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        chunk: Option<Chunk>,
    },
    /// Something that all ranks do together.
    Exchange(Exchange),
}

impl RankStep {
    /// What ranks do together, if that is what it is.
    pub fn exchange(&self) -> Option<&Exchange> {
        match self {
            RankStep::Exchange(exchange) => Some(exchange),
            RankStep::Launch { .. } => None,
        }
    }

    /// Whether both are exchanges that [go together](Exchange::goes_with).
    pub fn goes_with(&self, other: &RankStep) -> bool {
        let both = self.exchange().zip(other.exchange());
        both.is_some_and(|(one, other)| one.goes_with(other))
    }
}

/// What ranks do together. Sizes follow from counts: see [`RankPlan::bytes`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exchange {
    /// What it is called in errors and traces: `rows`.
    pub name: String,
    /// What goes where.
    #[serde(flatten)]
    pub op: CollectiveOp,
    /// How rows are between nodes, where they are not as in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packed: Option<Packed>,
    /// Which rows, where they travel in chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunk: Option<Chunk>,
}

impl Exchange {
    /// Whether it moves rows of the same tokens between the same ranks as another, so that
    /// both can be one operation.
    pub fn goes_with(&self, other: &Exchange) -> bool {
        let alike = match self.op {
            CollectiveOp::Dispatch { .. } => matches!(other.op, CollectiveOp::Dispatch { .. }),
            CollectiveOp::Combine { .. } => matches!(other.op, CollectiveOp::Combine { .. }),
            _ => false,
        };
        alike && self.chunk == other.chunk
    }
}

/// What goes where. Tensors are of the part that the name says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum CollectiveOp {
    /// Every rank learns how many tokens each has, before anything else: for the capacity,
    /// which is that of the rank with the most, and for the number of its first token.
    TokenCounts,
    /// Every rank of a group learns how many rows each has for every expert; which experts
    /// have shadows in this call follows from that.
    TokensPerExpert,
    /// Every rank of a group learns how many rows it gets for each of its experts from
    /// each rank; `offsets` and `row_tiles` of the expert part follow from that.
    RowCounts,
    /// Rows go to the ranks of their experts, every shard of one.
    Dispatch {
        /// Of the dispatch part, by expert.
        from: TensorId,
        /// Of the expert part, by expert, then by rank.
        to: TensorId,
    },
    /// Rows go back to the ranks they came from.
    Combine {
        /// Of the expert part, by expert, then by rank.
        from: TensorId,
        /// Of the dispatch part, by expert.
        to: TensorId,
    },
    /// Rows of experts with shadows stay: they become those of the shadow part.
    KeepShadowRows {
        /// Of the dispatch part, by expert.
        from: TensorId,
        /// Of the shadow part, by expert.
        to: TensorId,
    },
    /// And back.
    ReturnShadowRows {
        /// Of the shadow part, by expert.
        from: TensorId,
        /// Of the dispatch part, by expert.
        to: TensorId,
    },
    /// A weight of each expert with shadows goes from its owner to all groups.
    BroadcastShadowWeight {
        /// Of the expert part.
        from: TensorId,
        /// Of the shadow part.
        to: TensorId,
    },
    /// Gradients of a weight of shadows are summed over the groups; the owner has the sum.
    ReduceShadowGradient {
        /// Of the shadow part.
        from: TensorId,
        /// Of the expert part.
        to: TensorId,
    },
    /// A tensor of the expert part is summed over the shards of the experts.
    AllReduceTp {
        /// Of the expert part; each shard has the sum afterwards.
        tensor: TensorId,
    },
    /// Ranks with shards of the same experts learn how many tokens each has.
    TpTokenCounts,
    /// Rows of this rank's tokens go to every rank with shards of the same experts.
    AllGatherTp {
        /// Of the dispatch part, by token.
        from: TensorId,
        /// Of the shared-expert part, by rank, then by token.
        to: TensorId,
    },
    /// A tensor of the shared-expert part is summed over the shards; each rank gets the
    /// rows of its own tokens.
    ReduceScatterTp {
        /// Of the shared-expert part, by rank, then by token.
        from: TensorId,
        /// Of the dispatch part, by token.
        to: TensorId,
    },
    /// A weight of shared experts that the first shard has becomes that of all shards.
    BroadcastTp {
        /// Of the shared-expert part.
        from: TensorId,
        /// Of the dispatch part.
        to: TensorId,
    },
    /// A tensor of the dispatch part is summed over all ranks.
    AllReduceSum {
        /// Of the dispatch part.
        from: TensorId,
        /// Of the dispatch part.
        to: TensorId,
    },
    /// The tokens of all ranks that have an expert are counted.
    CountLiveTokens {
        /// Of the dispatch part: `topk_ids`.
        ids: TensorId,
        /// Of the dispatch part: their number.
        to: TensorId,
    },
    /// The largest of all ranks.
    AllReduceMax {
        /// Of the dispatch part; every rank has it afterwards.
        tensor: TensorId,
    },
    /// Where the assignments of this rank's tokens go becomes what routing the tokens of all
    /// ranks has decided, where a call needs that.
    GlobalRouting,
    /// What each tile of this rank's tokens adds to losses becomes the sum over all tiles of
    /// all ranks, in the first tile; the others have zeros.
    ReduceLossParts {
        /// Of the dispatch part, a row for each tile.
        tensor: TensorId,
    },
    /// The parts of a weight that the ranks of a block own become the weight of the experts'
    /// side of each.
    AllGatherWeight {
        /// Of the expert part.
        weight: TensorId,
        /// The dimension along which shards cut it.
        cut: Option<usize>,
    },
    /// Gradients of a weight of the expert part are summed over the ranks of a block; each
    /// gets the part that it owns.
    ReduceScatterGradient {
        /// Of the expert part.
        gradient: TensorId,
        /// The dimension along which shards cut it.
        cut: Option<usize>,
    },
    /// Weights of each group's experts, of the first shard, become those of all.
    AllGatherExperts {
        /// Of the expert part.
        from: TensorId,
        /// Of the dispatch part.
        to: TensorId,
    },
}

impl RankPlan {
    /// Whether weights of shadows stay from a forward pass to its backward pass: none is sent
    /// in that.
    pub fn keeps_shadow_weights(&self) -> bool {
        let mut exchanges = self.backward.iter().filter_map(RankStep::exchange);
        !exchanges.any(|exchange| matches!(exchange.op, CollectiveOp::BroadcastShadowWeight { .. }))
    }

    /// The steps of a pass that draws nothing and keeps nothing.
    pub fn evaluation_steps(&self) -> &[RankStep] {
        match self.tokens.training {
            Some(_) => &self.evaluation,
            None => &self.steps,
        }
    }

    /// Those of a forward pass that decide where tokens go: what ranks have to know of
    /// each other for that, and gate and scan of this rank's tokens. `of` are the steps of
    /// the same pass of [`RankPlan::tokens`].
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

    /// The plan of a part.
    ///
    /// # Panics
    /// For shared experts when they are whole, and for shadows where there are none: no step
    /// names these parts.
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

    /// The parts that there are.
    pub fn parts(&self) -> impl Iterator<Item = &LayerPlan> {
        self.named_parts().map(|(_, part)| part)
    }

    /// The parts that there are, with what [`RankPlan::text`] calls them.
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

    /// Bytes of one row of a tensor.
    pub fn row_bytes(&self, part: PlanPart, tensor: TensorId) -> usize {
        let tensor = &self.part(part)[tensor];
        let width: u64 = tensor
            .shape
            .iter()
            .skip(1)
            .map(|size| size.eval(0))
            .product();
        width as usize * tensor.dtype.size()
    }

    /// Which groups own which experts.
    pub fn placement(&self) -> Placement {
        let contiguous = || Placement::contiguous(self.mesh.ep, self.tokens.spec.shape.experts);
        self.placement.clone().unwrap_or_else(contiguous)
    }

    /// The experts that this rank has, in the order in which it has them.
    pub fn own_experts(&self) -> Vec<usize> {
        self.placement().of(self.place.ep).into_owned()
    }
}
