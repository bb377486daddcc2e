//! The tokens that the rules of a layer look at, across ranks.

use serde::{Deserialize, Serialize};

/// The tokens that auxiliary losses, capacities, and selections over tokens (Sinkhorn, expert
/// choice) look at in a layer over ranks. The `global` loss is always of all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenScope {
    /// The tokens of the rank itself, as in Tutel, FastMoE and DeepSpeed.
    #[default]
    Rank,
    /// The tokens of all ranks, as in one process. Ranks sum the terms of losses, and where a
    /// capacity or a selection needs it, each rank routes the tokens of all.
    World,
}

impl TokenScope {
    /// Returns whether it is the tokens of the rank itself.
    pub fn is_rank(&self) -> bool {
        *self == TokenScope::Rank
    }
}
