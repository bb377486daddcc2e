//! A choice for each direction of a pass.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A value for forward and one for backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Both<T> {
    /// The value for forward.
    pub forward: T,
    /// The value for backward.
    pub backward: T,
}

impl<T: Copy> Both<T> {
    /// Returns the same value for both.
    pub fn same(value: T) -> Both<T> {
        Both {
            forward: value,
            backward: value,
        }
    }
}

impl<T: fmt::Display + PartialEq> fmt::Display for Both<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.forward == self.backward {
            write!(f, "{}", self.forward)
        } else {
            write!(f, "{}/{}", self.forward, self.backward)
        }
    }
}
