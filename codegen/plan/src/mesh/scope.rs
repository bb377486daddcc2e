//! Whose tokens the rules of a layer look at, over ranks.

use serde::{Deserialize, Serialize};

/// The tokens that auxiliary losses, capacities, and selections over tokens (Sinkhorn, expert
/// choice) look at in a layer over ranks. The `global` loss is always of all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenScope {
    /// Those of the rank itself, as Tutel, FastMoE and DeepSpeed do.
    #[default]
    Rank,
    /// Those of all ranks, as one process has them: ranks sum what losses are made of, and
    /// where a capacity or a selection needs it, each routes the tokens of all.
    World,
}

impl TokenScope {
    pub(super) fn is_rank(&self) -> bool {
        *self == TokenScope::Rank
    }
}
