//! The messages of a hop.

use std::ops::Range;

/// The blocks that a rank exchanges with a peer in one hop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HopMessage {
    /// The other rank.
    pub peer: usize,
    /// The places of the blocks on this rank.
    pub places: Vec<Range<usize>>,
}
