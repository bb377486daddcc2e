//! The state between forward and backward.

use super::form::{PassTime, StrategyTuner};
use crate::mesh::RankSaved;
use crate::training::DeviceSaved;
use moesaic_plan::Strategy;
use std::fmt;
use std::sync::Arc;

/// The state that a training forward pass keeps for backward: inputs, the routing record and, as
/// the plan says, the pre-activations. Any number may be alive at a time. Dropping one gives its
/// memory to the next call, or, if a graph captured the call, to that graph alone.
pub struct Saved {
    pub(super) kept: Kept,
    /// The choice of a tuner, and the time of the forward pass.
    pub(super) timed: Option<Timed>,
}

impl fmt::Debug for Saved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Saved")
            .field("tokens", &self.tokens())
            .field("strategy", &self.strategy())
            .finish_non_exhaustive()
    }
}

/// The two kinds of states.
pub(super) enum Kept {
    /// The state of a layer of one process.
    One(DeviceSaved),
    /// The state of one rank.
    Ranks(Box<RankSaved>),
}

/// A tuner's choice and the time of its forward pass.
pub(super) struct Timed {
    pub(super) tuner: Arc<dyn StrategyTuner>,
    pub(super) choice: usize,
    pub(super) forward: PassTime,
}

impl Saved {
    /// Returns the tokens of the call; over ranks those of this rank.
    pub fn tokens(&self) -> usize {
        match &self.kept {
            Kept::One(saved) => saved.tokens(),
            Kept::Ranks(saved) => saved.tokens(),
        }
    }

    /// Returns the number of rows that this rank's experts got; `None` without ranks.
    pub fn rows(&self) -> Option<usize> {
        match &self.kept {
            Kept::One(_) => None,
            Kept::Ranks(saved) => Some(saved.rows()),
        }
    }

    /// Returns the experts that had shadows in the call, ordered by owner.
    pub fn shadowed(&self) -> &[usize] {
        match &self.kept {
            Kept::One(_) => &[],
            Kept::Ranks(saved) => saved.shadowed(),
        }
    }

    /// Returns the strategy of the call, which its backward pass uses, too.
    pub fn strategy(&self) -> Strategy {
        match &self.kept {
            Kept::One(_) => Strategy::default(),
            Kept::Ranks(saved) => saved.strategy(),
        }
    }
}
