//! The algorithms of an all-to-all.

use super::HopOrder;
use crate::{Levels, NodeShape};

/// The algorithm of an all-to-all exchange. All give the same bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Every rank sends to every other rank.
    #[default]
    Direct,
    /// Inside nodes first, then between ranks with equal local rank of different nodes: fewer and
    /// larger messages on the network, more copies (2DH).
    Hierarchical(NodeShape),
    /// Between nodes first, among ranks with equal local rank, then inside nodes: as few and as
    /// large messages as [`Algorithm::Hierarchical`].
    InterFirst(NodeShape),
    /// One half of each part inside nodes first, the other half between nodes first, so that both
    /// kinds of links are always busy.
    Concurrent(NodeShape),
    /// Around a ring of this many ranks: each sends only to the next one, which passes on what is
    /// for others. A rank sends about half the ranks times as many bytes as directly, so this is
    /// for machines whose ranks have links to two neighbours alone.
    Ring(usize),
    /// [`Algorithm::Hierarchical`] over groups of groups: the smallest groups first.
    Levels(Levels),
}

impl Algorithm {
    /// Returns the order of hops; `None` for direct messages.
    pub fn hops(self) -> Option<HopOrder> {
        match self {
            Algorithm::Direct => None,
            Algorithm::Hierarchical(shape) => Some(HopOrder::intra_first(shape)),
            Algorithm::InterFirst(shape) => Some(HopOrder::inter_first(shape)),
            Algorithm::Concurrent(shape) => Some(HopOrder::concurrent(shape)),
            Algorithm::Ring(ranks) => HopOrder::around(ranks),
            Algorithm::Levels(levels) => Some(HopOrder::upwards(levels)),
        }
    }
}
