//! The memory that a rank needs.

use crate::geometry::Rank;
use moesaic_plan::{LayerPlan, RankPlan, TensorRole};

/// The bytes of the rank that needs most. Scratch is counted as if no two tensors shared memory,
/// so a runtime that reuses memory needs less.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MemoryUse {
    /// Weights and, in training, their gradients.
    pub weights: f64,
    /// Weights that a pass gathers from other ranks, and those of shadows with their gradients.
    pub gathered: f64,
    /// Rows, activations and everything else that grows with the number of tokens.
    pub rows: f64,
    /// The part of `rows` that a forward pass leaves for backward.
    pub saved: f64,
    /// The part of `saved` that experts' GEMMs read: the rows of a rank's experts.
    pub inputs: f64,
    /// Rows that two-dimensional all-to-all algorithms forward.
    pub passed: f64,
}

impl MemoryUse {
    /// Returns the total.
    pub fn bytes(&self) -> f64 {
        self.weights + self.gathered + self.rows + self.passed
    }
}

/// Returns whether a tensor persists between calls.
fn stays(role: TensorRole) -> bool {
    matches!(
        role,
        TensorRole::Weight | TensorRole::Packed | TensorRole::WeightGradient
    )
}

fn kept(plan: &LayerPlan) -> f64 {
    let kept = plan.tensors.iter().filter(|tensor| stays(tensor.role));
    kept.map(|tensor| tensor.bytes(0) as f64).sum()
}

fn per_pass(plan: &LayerPlan, rows: f64) -> f64 {
    let passing = plan.tensors.iter().filter(|tensor| !stays(tensor.role));
    passing
        .map(|tensor| tensor.bytes(rows.ceil() as u64) as f64)
        .sum()
}

fn saved(plan: &LayerPlan, rows: f64) -> f64 {
    let rows = rows.ceil() as u64;
    let saved = plan.saved().into_iter();
    saved.map(|id| plan[id].bytes(rows) as f64).sum()
}

/// Returns the bytes of experts' rows that backward reads.
fn inputs(plan: &LayerPlan, rows: f64) -> f64 {
    let rows = rows.ceil() as u64;
    let saved = plan.saved().into_iter().map(|id| &plan[id]);
    let own = saved.filter(|tensor| tensor.name == "rows");
    own.map(|tensor| tensor.bytes(rows) as f64).sum()
}

/// Returns the memory of the rank that needs most. `owned` is the part of the plan's expert
/// weights that the rank owns, `part` the largest part of arriving rows that it gets.
pub(crate) fn memory(plan: &RankPlan, ranks: &[Rank], owned: f64, part: f64) -> MemoryUse {
    // Maxima may come from different ranks; the result is an upper bound that no rank exceeds.
    let most = |of: &dyn Fn(&Rank) -> f64| ranks.iter().map(of).fold(0.0, f64::max);
    let tokens = most(&|rank| rank.tokens);
    let arriving = most(&|rank| rank.arriving.iter().sum::<f64>() * part);
    let experts = kept(&plan.experts);
    let (shared, shadows) = (plan.shared.as_ref(), plan.shadows.as_ref());
    let stay = most(&|rank| rank.stay.iter().sum());
    // TP peers gather the tokens of all of them.
    let tp_tokens = tokens * plan.mesh.expert_tp as f64;
    let row = plan.experts.tensor("rows").map_or(0.0, |rows| {
        let width: u64 = rows.shape.iter().skip(1).map(|size| size.eval(0)).product();
        width as f64 * rows.dtype.size() as f64
    });
    // The parts of the plan with the rows that each works on.
    let parts = [
        Some((&plan.tokens, tokens)),
        Some((&plan.experts, arriving)),
        shared.map(|shared| (shared, tp_tokens)),
        shadows.map(|shadows| (shadows, stay)),
    ];
    let sum = |of: fn(&LayerPlan, f64) -> f64| {
        let parts = parts.iter().flatten();
        parts.map(|(plan, rows)| of(plan, *rows)).sum()
    };
    MemoryUse {
        weights: kept(&plan.tokens) + experts * owned + shared.map_or(0.0, kept),
        gathered: experts * (1.0 - owned) + shadows.map_or(0.0, kept),
        rows: sum(per_pass),
        saved: sum(saved),
        inputs: inputs(&plan.experts, arriving),
        passed: row * most(&|rank| rank.phases.iter().map(|phase| phase.copied).sum()) * part,
    }
}
