//! Auxiliary losses: which formula, with which coefficient.
//!
//! docs/SEMANTICS.md gives each formula with its normaliser and the group of
//! tokens that it is a sum over.

use serde::{Deserialize, Serialize};

/// An auxiliary loss. Training minimises the task's loss plus
/// `coefficient · loss` for each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Loss {
    /// The formula.
    pub kind: LossKind,
    /// The factor on it.
    pub coefficient: f64,
    /// For `sequence`: tokens of each sequence, the last one may be shorter.
    /// When absent a call gets `sequence_ids [T]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence_length: Option<usize>,
}

/// The formula of an auxiliary loss, over the E experts that the router
/// scores. `p` are a token's scores divided by their sum, softmax of the
/// logits where scores exist for selected experts only. `n_e` counts choices
/// before anything is dropped, T the tokens that have any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossKind {
    /// `E/(K·T²) · Σ n_e Σ p`: Switch for any K, as Megatron and MegaBlocks
    /// have it. 1 when balanced.
    Switch,
    /// `E/T² · Σ n_e Σ p`, n_e over first choices only: GShard, Tutel.
    Gshard,
    /// `E/T² · Σ n_e Σ p` over all choices: K times `switch`, as Hugging Face
    /// has it.
    GshardAll,
    /// Half the squared coefficients of variation of importance and load, as
    /// Tutel has it: a probability is compared with a noisy logit.
    ImportanceLoad,
    /// The squared coefficients of variation of importance and load, as
    /// Shazeer (2017) and FastMoE have it: logits are compared with logits.
    ImportanceLoadLogits,
    /// `mean(logsumexp(z)²)` (ST-MoE).
    Z,
    /// The mean over sequences of `switch` within each (DeepSeek).
    Sequence,
    /// `switch` with n_e and T of a larger group of tokens, which the caller
    /// gives: the parts of the group add up to its loss.
    Global,
}

impl LossKind {
    /// Every formula.
    pub const ALL: [LossKind; 8] = [
        LossKind::Switch,
        LossKind::Gshard,
        LossKind::GshardAll,
        LossKind::ImportanceLoad,
        LossKind::ImportanceLoadLogits,
        LossKind::Z,
        LossKind::Sequence,
        LossKind::Global,
    ];

    /// The kebab-case spelling.
    pub const fn name(self) -> &'static str {
        match self {
            LossKind::Switch => "switch",
            LossKind::Gshard => "gshard",
            LossKind::GshardAll => "gshard-all",
            LossKind::ImportanceLoad => "importance-load",
            LossKind::ImportanceLoadLogits => "importance-load-logits",
            LossKind::Z => "z",
            LossKind::Sequence => "sequence",
            LossKind::Global => "global",
        }
    }

    /// Whether the load is a probability under the router's noise.
    pub const fn needs_noise(self) -> bool {
        matches!(
            self,
            LossKind::ImportanceLoad | LossKind::ImportanceLoadLogits
        )
    }
}

#[cfg(test)]
mod tests {
    use super::LossKind;

    #[test]
    fn names_are_the_words_of_the_text() {
        for kind in LossKind::ALL {
            assert_eq!(kind.name(), crate::write::word(&kind));
        }
    }
}
