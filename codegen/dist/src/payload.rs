//! The content of rows that ranks exchange.

use serde::{Deserialize, Serialize};

/// The content of the rows of one tensor on their way to experts or back. It decides what an
/// algorithm may do with them: send equal rows once, add them up on the way, cast them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Payload {
    /// Vectors that are equal for all experts of a token.
    PerToken,
    /// Vectors that differ from expert to expert and are read one by one.
    PerRow,
    /// Vectors of which only the sum over the experts of a token is read.
    PartialSums,
    /// A few numbers for each row, such as its weight.
    Scalars,
}

impl Payload {
    /// Returns whether rows may travel in another dtype. A few numbers for each row are too little
    /// to be worth a cast.
    pub fn is_castable(self) -> bool {
        self != Payload::Scalars
    }
}
