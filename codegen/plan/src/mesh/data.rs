//! The plan of one rank, as data.

use crate::{LayerPlan, Step, TensorId};
use moesaic_dist::{Chunk, CollectiveOp, Parallel, Payload, Placement, PlanPart, RankCoords};
use moesaic_dist::{CommDtype, TokenScope};
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

/// The name of [`RankPlan::comm_cast`] in texts and traces.
pub(super) const NODES: &str = "nodes";

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

/// One exchange between ranks: an operation of the table ([`CollectiveOp::row`]) on some tensors.
/// Its sizes follow from counts: see [`RankPlan::bytes`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exchange {
    /// The name in errors and traces, such as `rows`.
    pub name: String,
    /// The operation.
    pub op: CollectiveOp,
    /// Its tensors; `None` for counts that no kernel reads.
    #[serde(flatten)]
    pub tensors: Option<FromTo>,
    /// The content of the rows, where they go to experts or back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub payload: Option<Payload>,
    /// The dimension that shards split, where a weight or its gradient is gathered or scattered;
    /// `None` if they do not split it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dim: Option<usize>,
    /// The cast of rows between nodes; `None` where they travel as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packed: Option<Packed>,
    /// The chunk of rows, where rows come in chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunk: Option<Chunk>,
}

/// The tensors of an exchange. [`OpRow`](moesaic_dist::OpRow) says which part has each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FromTo {
    /// The tensor that it reads.
    pub from: TensorId,
    /// The tensor that it writes; the same one where it works in place.
    pub to: TensorId,
}

impl FromTo {
    /// Returns the tensors of an operation that works in place.
    pub fn in_place(tensor: TensorId) -> FromTo {
        FromTo {
            from: tensor,
            to: tensor,
        }
    }
}

/// The cast of an exchange's rows between nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Packed {
    /// The dtype of the rows between nodes.
    pub comm_dtype: CommDtype,
    /// Bytes of one cast row.
    pub row_bytes: usize,
    /// The steps of [`RankPlan::comm_cast`] that run before the exchange; their `tokens` are the
    /// rows that this rank sends to other nodes.
    pub pack: Vec<usize>,
    /// The step that runs after the exchange; its `tokens` are the rows received from other nodes.
    pub unpack: usize,
    /// The rows in their own dtype: a tensor of [`RankPlan::comm_cast`] for which the caller of the
    /// step supplies the address.
    pub rows: TensorId,
    /// The rows that are sent.
    pub sent: CastLane,
    /// The rows that are received.
    pub received: CastLane,
}

/// Cast rows, as tensors of [`RankPlan::comm_cast`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CastLane {
    /// The bytes of the rows.
    pub bytes: TensorId,
    /// The index of each row in the tensor of uncast rows.
    pub places: TensorId,
}

/// A tensor of a rank, by its part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartTensor {
    /// The part.
    pub part: PlanPart,
    /// The tensor in that part's plan.
    pub tensor: TensorId,
}

impl Exchange {
    /// Returns an exchange of all rows, as they are.
    pub fn new(name: &str, op: CollectiveOp, tensors: Option<FromTo>) -> Exchange {
        Exchange {
            name: name.to_string(),
            op,
            tensors,
            payload: None,
            dim: None,
            packed: None,
            chunk: None,
        }
    }

    /// Returns whether this exchange moves rows of the same tokens between the same ranks as
    /// `other`, so that both can be one operation.
    pub fn goes_with(&self, other: &Exchange) -> bool {
        self.op.exchanges_rows() && self.op == other.op && self.chunk == other.chunk
    }

    /// Returns the tensor that the exchange reads.
    pub fn reads(&self) -> Option<PartTensor> {
        let (part, tensors) = (self.op.row().from?, self.tensors?);
        let tensor = tensors.from;
        Some(PartTensor { part, tensor })
    }

    /// Returns the tensor that the exchange writes.
    pub fn writes(&self) -> Option<PartTensor> {
        let (part, tensors) = (self.op.row().to?, self.tensors?);
        let tensor = tensors.to;
        Some(PartTensor { part, tensor })
    }

    /// Returns whether the exchange reads and writes the same tensor.
    pub fn is_in_place(&self) -> bool {
        self.reads().is_some() && self.reads() == self.writes()
    }
}

impl RankPlan {
    /// Returns whether weights of shadows stay from a forward pass to its backward pass, which then
    /// sends none.
    pub fn keeps_shadow_weights(&self) -> bool {
        // Read off the steps, so that the runtime cannot free weights that a step still reads.
        let mut exchanges = self.backward.iter().filter_map(RankStep::exchange);
        !exchanges.any(|exchange| exchange.op == CollectiveOp::BroadcastShadowWeight)
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
                        | CollectiveOp::AllReduceMax
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
