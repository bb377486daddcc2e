//! What one rank does, as data.

use super::{Packed, Parallel, Piece, Place, TokenScope};
use crate::{LayerPlan, Placement, Step, TensorId};
use serde::{Deserialize, Serialize};

/// What one rank does in each pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankPlan {
    /// How ranks share the layer.
    pub mesh: Parallel,
    /// Which of them this is.
    pub place: Place,
    /// Which groups have which experts; `None`: as [`Parallel::experts`] says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// To how many slices of its expert a row goes; 0 where rows stay. Fewer than weights
    /// have: the experts' side has weights that are gathered ([`Way::GatherWeight`]).
    pub ways: usize,
    /// What is done with this rank's tokens.
    pub tokens: LayerPlan,
    /// What this rank's experts do with the rows that arrive. Its tokens are rows.
    pub experts: LayerPlan,
    /// What this rank does with rows of experts that have shadows in a call, with as many
    /// experts as there may be. Its tokens are rows that stay. `None` where there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadows: Option<LayerPlan>,
    /// What this rank's slices of shared experts do with the tokens of all ranks that have
    /// slices of the same experts; `None` where shared experts are whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<LayerPlan>,
    /// Whose tokens losses, capacities and selections look at.
    #[serde(default, skip_serializing_if = "TokenScope::is_rank")]
    pub scope: TokenScope,
    /// What is done with rows that go to other nodes or come from there, where they are packed
    /// for that ([`RankPlan::in_wire`]). Its tokens are such rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wire: Option<LayerPlan>,
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
pub enum Side {
    /// [`RankPlan::tokens`].
    Tokens,
    /// [`RankPlan::experts`].
    Experts,
    /// [`RankPlan::shadows`].
    Shadows,
    /// [`RankPlan::shared`].
    Shared,
}

/// What launches of [`RankPlan::wire`] are called.
pub(super) const NODES: &str = "nodes";

impl Side {
    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Side::Tokens => "tokens",
            Side::Experts => "experts",
            Side::Shadows => "shadows",
            Side::Shared => "shared",
        }
    }
}

/// One thing that a rank does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RankStep {
    /// A step of the pass of the same name of a side's plan, by its number.
    Launch {
        /// Whose.
        side: Side,
        /// Which.
        step: usize,
        /// For which rows, where they come in pieces.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        piece: Option<Piece>,
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
    pub way: Way,
    /// How rows are between nodes, where they are not as in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packed: Option<Packed>,
    /// Which rows, where they travel in pieces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub piece: Option<Piece>,
}

impl Exchange {
    /// Whether it moves rows of the same tokens between the same ranks as another, so that
    /// both can be one operation.
    pub fn goes_with(&self, other: &Exchange) -> bool {
        let alike = match self.way {
            Way::ToExperts { .. } => matches!(other.way, Way::ToExperts { .. }),
            Way::ToTokens { .. } => matches!(other.way, Way::ToTokens { .. }),
            _ => false,
        };
        alike && self.piece == other.piece
    }
}

/// What goes where. Tensors are of the side that the name says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "way", rename_all = "snake_case")]
pub enum Way {
    /// Every rank learns how many tokens each has, before anything else: for the capacity,
    /// which is that of the rank with the most, and for the number of its first token.
    Tokens,
    /// Every rank of a group learns how many rows each has for every expert; which experts
    /// have shadows in this call follows from that.
    Loads,
    /// Every rank of a group learns how many rows it gets for each of its experts from
    /// each rank; `offsets` and `row_tiles` of the experts' side follow from that.
    Counts,
    /// Rows go to the ranks of their experts, every slice of one.
    ToExperts {
        /// Of the tokens' side, by expert.
        from: TensorId,
        /// Of the experts' side, by expert, then by rank.
        to: TensorId,
    },
    /// Rows go back to the ranks they came from.
    ToTokens {
        /// Of the experts' side, by expert, then by rank.
        from: TensorId,
        /// Of the tokens' side, by expert.
        to: TensorId,
    },
    /// Rows of experts with shadows stay: they become those of the shadows' side.
    ToShadows {
        /// Of the tokens' side, by expert.
        from: TensorId,
        /// Of the shadows' side, by expert.
        to: TensorId,
    },
    /// And back.
    FromShadows {
        /// Of the shadows' side, by expert.
        from: TensorId,
        /// Of the tokens' side, by expert.
        to: TensorId,
    },
    /// A weight of each expert with shadows goes from its owner to all groups.
    ShadowWeight {
        /// Of the experts' side.
        from: TensorId,
        /// Of the shadows' side.
        to: TensorId,
    },
    /// Gradients of a weight of shadows are summed over the groups; the owner has the sum.
    ShadowGradient {
        /// Of the shadows' side.
        from: TensorId,
        /// Of the experts' side.
        to: TensorId,
    },
    /// A tensor of the experts' side is summed over the slices of the experts.
    OverShards {
        /// Of the experts' side; each slice has the sum afterwards.
        tensor: TensorId,
    },
    /// Ranks with slices of the same experts learn how many tokens each has.
    Neighbours,
    /// Rows of this rank's tokens go to every rank with slices of the same experts.
    ToSlices {
        /// Of the tokens' side, by token.
        from: TensorId,
        /// Of the shared experts' side, by rank, then by token.
        to: TensorId,
    },
    /// A tensor of the shared experts' side is summed over the slices; each rank gets the
    /// rows of its own tokens.
    FromSlices {
        /// Of the shared experts' side, by rank, then by token.
        from: TensorId,
        /// Of the tokens' side, by token.
        to: TensorId,
    },
    /// A weight of shared experts that the first slice has becomes that of all slices.
    OfFirst {
        /// Of the shared experts' side.
        from: TensorId,
        /// Of the tokens' side.
        to: TensorId,
    },
    /// A tensor of the tokens' side is summed over all ranks.
    Sum {
        /// Of the tokens' side.
        from: TensorId,
        /// Of the tokens' side.
        to: TensorId,
    },
    /// The tokens of all ranks that have an expert are counted.
    Live {
        /// Of the tokens' side: `topk_ids`.
        ids: TensorId,
        /// Of the tokens' side: their number.
        to: TensorId,
    },
    /// The largest of all ranks.
    Most {
        /// Of the tokens' side; every rank has it afterwards.
        tensor: TensorId,
    },
    /// Where the assignments of this rank's tokens go becomes what routing the tokens of all
    /// ranks has decided, where a call needs that.
    Placed,
    /// What each tile of this rank's tokens adds to losses becomes the sum over all tiles of
    /// all ranks, in the first tile; the others have zeros.
    LossParts {
        /// Of the tokens' side, a row for each tile.
        tensor: TensorId,
    },
    /// The parts of a weight that the ranks of a block own become the weight of the experts'
    /// side of each.
    GatherWeight {
        /// Of the experts' side.
        weight: TensorId,
        /// The dimension along which slices cut it.
        cut: Option<usize>,
    },
    /// Gradients of a weight of the experts' side are summed over the ranks of a block; each
    /// gets the part that it owns.
    ScatterGradient {
        /// Of the experts' side.
        gradient: TensorId,
        /// The dimension along which slices cut it.
        cut: Option<usize>,
    },
    /// Weights of each group's experts, of the first slice, become those of all.
    Gather {
        /// Of the experts' side.
        from: TensorId,
        /// Of the tokens' side.
        to: TensorId,
    },
}

impl RankPlan {
    /// Whether weights of shadows stay from a forward pass to its backward pass: none is sent
    /// in that.
    pub fn keeps_shadow_weights(&self) -> bool {
        let mut exchanges = self.backward.iter().filter_map(RankStep::exchange);
        !exchanges.any(|exchange| matches!(exchange.way, Way::ShadowWeight { .. }))
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
            RankStep::Launch { side, step, .. } => *side == Side::Tokens && *step < scanned,
            RankStep::Exchange(Exchange { way, .. }) => {
                matches!(way, Way::Tokens | Way::Most { .. } | Way::Placed)
            }
        };
        steps.iter().filter(decides).cloned().collect()
    }

    /// The plan of a side.
    ///
    /// # Panics
    /// For shared experts when they are whole, and for shadows where there are none: no step
    /// names these sides.
    pub fn side(&self, side: Side) -> &LayerPlan {
        match side {
            Side::Tokens => &self.tokens,
            Side::Experts => &self.experts,
            Side::Shadows => {
                let shadows = self.shadows.as_ref();
                shadows.expect("steps of shadows are of plans with shadows")
            }
            Side::Shared => {
                let shared = self.shared.as_ref();
                shared.expect("steps of shared experts are of ranks with slices of them")
            }
        }
    }

    /// The sides that there are.
    pub fn sides(&self) -> impl Iterator<Item = &LayerPlan> {
        self.named_sides().map(|(_, side)| side)
    }

    /// The sides that there are, with what [`RankPlan::text`] calls them.
    pub fn named_sides(&self) -> impl Iterator<Item = (&'static str, &LayerPlan)> {
        let named = |side: Side, plan| (side.name(), plan);
        [
            Some(named(Side::Tokens, &self.tokens)),
            Some(named(Side::Experts, &self.experts)),
            (self.shadows.as_ref()).map(|plan| named(Side::Shadows, plan)),
            (self.shared.as_ref()).map(|plan| named(Side::Shared, plan)),
            self.wire.as_ref().map(|plan| (NODES, plan)),
        ]
        .into_iter()
        .flatten()
    }

    /// Bytes of one row of a tensor.
    pub fn row_bytes(&self, side: Side, tensor: TensorId) -> usize {
        let tensor = &self.side(side)[tensor];
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
