//! The parts of a rank's plan.

use serde::{Deserialize, Serialize};

/// A part of a rank's plan: the layer plan that a tensor or kernel belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlanPart {
    /// The layer without its experts, for this rank's tokens.
    Dispatch,
    /// This rank's experts, for the rows that arrive.
    Experts,
    /// Shadowed experts, for rows that stay on this rank.
    Shadows,
    /// This rank's shards of shared experts, for the tokens of all TP peers.
    Shared,
}

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
