//! What a choice is made for.

use serde::{Deserialize, Serialize};

/// What a choice of strategy depends on. Choices for one key say nothing about others.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// Devices and libraries: choices of one machine are not another's.
    pub machine: String,
    /// Layer, mesh, and ranks of a node.
    pub layer: String,
    /// How many rows there are, roughly.
    pub rows: Rows,
}

/// How many rows there are, in steps within which a choice is thought to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rows {
    /// Of layers with a capacity: whole 128ths of the rows that an expert takes from a rank, as
    /// in Tutel's dictionary.
    Capacity(usize),
    /// Of layers without one: the power of two that holds the tokens of the rank with the
    /// most.
    Tokens(u32),
}

impl Rows {
    /// With a capacity of so many rows.
    pub fn of_capacity(capacity: usize) -> Rows {
        Rows::Capacity(capacity / 128)
    }

    /// With so many tokens on the rank with the most.
    pub fn of_tokens(most: usize) -> Rows {
        Rows::Tokens(most.max(1).next_power_of_two().ilog2())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_in_steps() {
        assert_eq!(Rows::of_capacity(127), Rows::of_capacity(0));
        assert_ne!(Rows::of_capacity(127), Rows::of_capacity(128));
        assert_eq!(Rows::of_tokens(0), Rows::of_tokens(1));
        assert_eq!(Rows::of_tokens(513), Rows::of_tokens(1024));
        assert_ne!(Rows::of_tokens(1024), Rows::of_tokens(1025));
    }
}
