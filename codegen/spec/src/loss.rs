//! Auxiliary losses: their formulas and coefficients.
//!
//! docs/SEMANTICS.md gives each formula with its normalizer and the tokens that it sums over.

use serde::{Deserialize, Serialize};

/// An auxiliary loss. Training minimizes the task's loss plus `coefficient · loss` for each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Loss {
    /// The formula.
    pub kind: LossKind,
    /// The factor on it.
    pub coefficient: f64,
    /// For `sequence`: the tokens of each sequence; the last one may be shorter. When absent, each
    /// call passes `sequence_ids [T]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence_length: Option<usize>,
}

/// The formula of an auxiliary loss, over the E experts that the router scores. `p` are a token's
/// scores divided by their sum, or the softmax of its logits where only selected experts have
/// scores. `n_e` counts choices before anything is dropped. T counts the tokens that choose any
/// expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossKind {
    /// `E/(K·T²) · Σ n_e Σ p`: Switch for any K, as in Megatron and MegaBlocks. 1 when balanced.
    Switch,
    /// `E/T² · Σ n_e Σ p` with n_e over first choices only: GShard, Tutel.
    Gshard,
    /// `E/T² · Σ n_e Σ p` over all choices: K times `switch`, as in Hugging Face.
    GshardAll,
    /// Half the squared coefficients of variation of importance and load, as in Tutel, which
    /// compares a probability with a noisy logit.
    ImportanceLoad,
    /// The squared coefficients of variation of importance and load, as in Shazeer (2017) and
    /// FastMoE, which compare logits with logits.
    ImportanceLoadLogits,
    /// `mean(logsumexp(z)²)` (ST-MoE).
    Z,
    /// The mean over sequences of `switch` within each (DeepSeek).
    Sequence,
    /// `switch` with n_e and T of a larger group of tokens, which the caller passes. The losses of
    /// the group's parts add up to that of the group.
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

    /// Returns the kebab-case spelling.
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

    /// Returns true if the load is a probability under the router's noise.
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
