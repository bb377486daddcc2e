//! Capacity: a limit on the rows of each expert, and the order in which tokens fill it.

use crate::MAX_CAPACITY_FACTOR;
use serde::{Deserialize, Serialize};

/// A limit on the rows of each expert.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Capacity {
    /// The rule that sets the limit.
    pub mode: CapacityMode,
    /// For `factor` and `bounded`. Tutel's formula: positive f gives
    /// `K·int(f·ceil(T/E))`, zero the largest count, negative the smaller of
    /// both with |f|.
    pub factor: f64,
    /// The factor in evaluation, where it differs from that of training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_factor: Option<f64>,
    /// For `fixed`: rows per expert.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rows: Option<usize>,
    /// The order in which assignments are served, which decides who is dropped when rows run out.
    pub order: CapacityOrder,
    /// Capacity is rounded up to a multiple of this.
    pub align: usize,
    /// Renormalise a token's weights over its surviving experts.
    pub renormalize_after_drop: bool,
}

impl Default for Capacity {
    fn default() -> Self {
        Capacity {
            mode: CapacityMode::Dropless,
            factor: 1.0,
            eval_factor: None,
            rows: None,
            order: CapacityOrder::SlotMajor,
            align: 1,
            renormalize_after_drop: false,
        }
    }
}

impl Capacity {
    /// Returns true if the rule has a factor, which a call may change.
    pub fn has_factor(&self) -> bool {
        matches!(self.mode, CapacityMode::Factor | CapacityMode::Bounded)
    }

    /// Checks that a call may use this factor.
    ///
    /// # Errors
    /// If the rule has no factor, or the number is not finite or too large.
    pub fn check_factor(&self, factor: f64) -> Result<(), FactorError> {
        if !self.has_factor() {
            return Err(FactorError::NoFactor { mode: self.mode });
        }
        if factor.abs() <= MAX_CAPACITY_FACTOR {
            Ok(())
        } else {
            Err(FactorError::OutOfRange { factor })
        }
    }

    /// Returns the factor of calls that give none: that of training or that of evaluation.
    pub fn factor_of(&self, training: bool) -> f64 {
        match self.eval_factor {
            Some(factor) if !training => factor,
            _ => self.factor,
        }
    }
}

/// A capacity factor that a call cannot have.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FactorError {
    /// The rule has no factor.
    #[error(
        "mode = \"{}\" has no factor; modes \"factor\" and \"bounded\" have one",
        crate::write::word(mode)
    )]
    NoFactor {
        /// The rule of the spec.
        mode: CapacityMode,
    },
    /// The number is not finite or too large.
    #[error("it must be between -{MAX_CAPACITY_FACTOR} and {MAX_CAPACITY_FACTOR}")]
    OutOfRange {
        /// The factor that was asked for.
        factor: f64,
    },
}

/// The capacity rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CapacityMode {
    /// Every assignment gets a row.
    Dropless,
    /// A multiple of the balanced load, given by `factor`.
    Factor,
    /// A constant number of rows.
    Fixed,
    /// The largest count of this call, so nothing is dropped.
    MaxCount,
    /// As `factor`, and the call reports the number of dropped assignments in `overflow`, so the
    /// caller can run it again with a larger factor.
    Bounded,
}

/// The order in which assignments get rows of an expert; the last ones are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CapacityOrder {
    /// All first choices before all second choices; tokens ascending.
    SlotMajor,
    /// Tokens ascending; the choices of a token together.
    TokenMajor,
    /// Slot-major over tokens by descending best score (stable).
    BatchPrioritized,
    /// Descending weight, then slot-major.
    Probability,
    /// Descending counter-based random key, then slot-major.
    Random,
}
