//! What a choice is made for.

use serde::{Deserialize, Serialize};

/// What a choice of strategy depends on. Choices for one key say nothing about others.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// Devices and libraries: choices of one machine are not another's.
    pub machine: String,
    /// Layer, mesh, placement of experts and nodes: `MeshLayer::identity`.
    pub layer: String,
    /// Steps of training, or evaluations.
    #[serde(default, skip_serializing_if = "Calls::train")]
    pub calls: Calls,
    /// How many rows there are, roughly.
    pub rows: Rows,
}

/// What is timed.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Calls {
    /// Steps of training: a forward pass and a backward pass.
    #[default]
    Training,
    /// Evaluations: a forward pass alone, which keeps nothing.
    Evaluation,
}

impl Calls {
    /// Whether there is a backward pass.
    pub fn train(&self) -> bool {
        *self == Calls::Training
    }
}

/// How many rows there are, in steps within which a choice is thought to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rows {
    /// Of layers that drop nothing: the power of two that holds the tokens of the rank with
    /// the most.
    Tokens(u32),
    /// Of layers with a capacity, which calls may choose.
    Capped {
        /// As [`Rows::Tokens`].
        tokens: u32,
        /// Whole 128ths of the rows that an expert takes from a rank, as in Tutel's
        /// dictionary.
        capacity: u64,
    },
}

/// Rows of a step of capacity.
const STEP: u64 = 128;

impl Rows {
    /// With so many tokens on the rank with the most, of which an expert takes so many rows at
    /// most.
    pub fn of(most: usize, capacity: Option<u64>) -> Rows {
        let tokens = most.max(1).next_power_of_two().ilog2();
        match capacity {
            None => Rows::Tokens(tokens),
            Some(capacity) => Rows::Capped {
                tokens,
                capacity: capacity / STEP,
            },
        }
    }

    /// As many tokens as there may be.
    pub fn tokens(self) -> u64 {
        let (Rows::Tokens(power) | Rows::Capped { tokens: power, .. }) = self;
        1 << power
    }

    /// The capacity in the middle of its step.
    pub(crate) fn middle(capacity: u64) -> u64 {
        capacity * STEP + STEP / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_in_steps() {
        let of_tokens = |most| Rows::of(most, None);
        assert_eq!(of_tokens(0), of_tokens(1));
        assert_eq!(of_tokens(513), of_tokens(1024));
        assert_ne!(of_tokens(1024), of_tokens(1025));
        assert_eq!(of_tokens(1000).tokens(), 1024);
        let of_capacity = |capacity| Rows::of(1000, Some(capacity));
        assert_eq!(of_capacity(127), of_capacity(0));
        assert_ne!(of_capacity(127), of_capacity(128));
        assert_ne!(of_capacity(128), Rows::of(2000, Some(128)));
        let Rows::Capped { capacity, .. } = of_capacity(300) else {
            panic!("it has a capacity");
        };
        assert_eq!(of_capacity(Rows::middle(capacity)), of_capacity(300));
    }
}
