//! What a rank has to hold.

use crate::geometry::Rank;
use moesaic_plan::{LayerPlan, RankPlan, Role};

/// Bytes of a rank, of the one that needs most. Scratch is counted as if nothing took the
/// place of something else, so that a runtime which reuses it needs less.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Memory {
    /// Weights, and in training their gradients, that stay.
    pub weights: f64,
    /// Weights of other ranks that a pass gathers, and those of shadows with their gradients.
    pub gathered: f64,
    /// Rows, activations and what else depends on the number of tokens.
    pub rows: f64,
    /// What all-to-all algorithms in two dimensions pass on.
    pub passed: f64,
}

impl Memory {
    /// All of it.
    pub fn bytes(&self) -> f64 {
        self.weights + self.gathered + self.rows + self.passed
    }
}

/// Whether a tensor stays between calls.
fn stays(role: Role) -> bool {
    matches!(role, Role::Weight | Role::Packed | Role::WeightGradient)
}

fn kept(plan: &LayerPlan) -> f64 {
    let kept = plan.tensors.iter().filter(|tensor| stays(tensor.role));
    kept.map(|tensor| tensor.bytes(0) as f64).sum()
}

fn passing(plan: &LayerPlan, rows: f64) -> f64 {
    let passing = plan.tensors.iter().filter(|tensor| !stays(tensor.role));
    passing
        .map(|tensor| tensor.bytes(rows.ceil() as u64) as f64)
        .sum()
}

/// `owned`: the part of the experts' weights in the plan that is the rank's own; `part`: of
/// the rows that arrive at most the ones that it gets.
pub(crate) fn memory(plan: &RankPlan, ranks: &[Rank], owned: f64, part: f64) -> Memory {
    let most = |of: &dyn Fn(&Rank) -> f64| ranks.iter().map(of).fold(0.0, f64::max);
    let tokens = most(&|rank| rank.tokens);
    let arriving = most(&|rank| rank.arriving.iter().sum::<f64>() * part);
    let experts = kept(&plan.experts);
    let (shared, shadows) = (plan.shared.as_ref(), plan.shadows.as_ref());
    let stay = most(&|rank| rank.stay.iter().sum());
    let neighbours = tokens * plan.mesh.expert_tp as f64;
    let row = plan.experts.tensor("rows").map_or(0.0, |rows| {
        let width: u64 = rows.shape.iter().skip(1).map(|size| size.eval(0)).product();
        width as f64 * rows.dtype.size() as f64
    });
    Memory {
        weights: kept(&plan.tokens) + experts * owned + shared.map_or(0.0, kept),
        gathered: experts * (1.0 - owned) + shadows.map_or(0.0, kept),
        rows: passing(&plan.tokens, tokens)
            + passing(&plan.experts, arriving)
            + shared.map_or(0.0, |shared| passing(shared, neighbours))
            + shadows.map_or(0.0, |shadows| passing(shadows, stay)),
        passed: row * most(&|rank| rank.phases.iter().map(|phase| phase.copied).sum()) * part,
    }
}
