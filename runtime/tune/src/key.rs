//! The key of a choice.

use serde::{Deserialize, Serialize};

/// The circumstances that a choice of strategy depends on. A choice for one key says nothing
/// about another.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunerKey {
    /// The devices and libraries: a choice on one machine does not apply to another.
    pub machine: String,
    /// The layer, mesh, placement of experts and nodes: `Layer::identity`.
    pub layer: String,
    /// The kind of calls: training or evaluation.
    #[serde(default, skip_serializing_if = "CallKind::train")]
    pub calls: CallKind,
    /// The approximate number of rows.
    pub rows: RowBucket,
}

/// The kind of calls that are timed.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum CallKind {
    /// Training steps: a forward and a backward pass.
    #[default]
    Training,
    /// Evaluations: a forward pass alone, which saves nothing.
    Evaluation,
}

impl CallKind {
    /// Returns whether there is a backward pass.
    pub fn train(&self) -> bool {
        *self == CallKind::Training
    }
}

/// The number of rows, in ranges within which a choice is assumed to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowBucket {
    /// For layers that drop nothing: the power of two that holds the tokens of the rank with the
    /// most.
    Tokens(u32),
    /// For layers with a capacity, which each call may choose.
    Capped {
        /// As [`RowBucket::Tokens`].
        tokens: u32,
        /// The rows that an expert accepts from a rank, in whole units of 128, as in Tutel's
        /// dictionary.
        capacity: u64,
    },
}

/// The rows per unit of capacity.
const STEP: u64 = 128;

impl RowBucket {
    /// Returns the range for `most` tokens on the rank with the most, where an expert accepts at
    /// most `capacity` rows.
    pub fn of(most: usize, capacity: Option<u64>) -> RowBucket {
        let tokens = most.max(1).next_power_of_two().ilog2();
        match capacity {
            None => RowBucket::Tokens(tokens),
            Some(capacity) => RowBucket::Capped {
                tokens,
                capacity: capacity / STEP,
            },
        }
    }

    /// Returns the most tokens of the range.
    pub fn tokens(self) -> u64 {
        let (RowBucket::Tokens(power) | RowBucket::Capped { tokens: power, .. }) = self;
        1 << power
    }

    /// Returns the capacity in the middle of its range.
    pub(crate) fn middle(capacity: u64) -> u64 {
        capacity * STEP + STEP / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_in_steps() {
        let of_tokens = |most| RowBucket::of(most, None);
        assert_eq!(of_tokens(0), of_tokens(1));
        assert_eq!(of_tokens(513), of_tokens(1024));
        assert_ne!(of_tokens(1024), of_tokens(1025));
        assert_eq!(of_tokens(1000).tokens(), 1024);
        let of_capacity = |capacity| RowBucket::of(1000, Some(capacity));
        assert_eq!(of_capacity(127), of_capacity(0));
        assert_ne!(of_capacity(127), of_capacity(128));
        assert_ne!(of_capacity(128), RowBucket::of(2000, Some(128)));
        let RowBucket::Capped { capacity, .. } = of_capacity(300) else {
            panic!("it has a capacity");
        };
        assert_eq!(of_capacity(RowBucket::middle(capacity)), of_capacity(300));
    }
}
