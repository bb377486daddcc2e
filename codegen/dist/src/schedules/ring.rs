//! Paths around a ring: in each hop, every rank sends all that has not arrived to the next rank.
//!
//! A block from `p` to `q` moves one rank further in each hop until it is at `q`, and stays there.
//! After `h` hops, rank `r` holds what has arrived from the ranks `r - h` to `r`, and what rank
//! `r - h` sends to all others. The *place* of a block is its source if it has arrived, and its
//! destination otherwise, so a rank holds one pair of ranks at each place at any time.

use super::hop_message::HopMessage;
use std::ops::Range;

/// A ring of all ranks, in the order of their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// The number of ranks.
    pub ranks: usize,
    /// Whether data go back: by the same hops, the last one first and each in the opposite
    /// direction, so that they pass the ranks that know their sizes.
    pub back: bool,
}

impl Ring {
    /// Returns the ring in the opposite direction.
    #[must_use]
    pub fn reversed(self) -> Ring {
        let back = !self.back;
        Ring { back, ..self }
    }

    /// Returns the number of hops.
    pub fn hops(self) -> usize {
        // A single rank has one hop without messages, in which it copies what it sends itself.
        self.ranks.saturating_sub(1).max(1)
    }

    /// Returns source and destination of the block at a place of a rank, after `hops` hops.
    pub(super) fn pair(self, hops: usize, rank: usize, place: usize) -> (usize, usize) {
        let made = if self.back { self.hops() - hops } else { hops };
        let distance = (rank + self.ranks - place) % self.ranks;
        let (from, to) = if distance <= made {
            (place, rank)
        } else {
            ((rank + self.ranks - made) % self.ranks, place)
        };
        if self.back { (to, from) } else { (from, to) }
    }

    /// Returns the message that a rank sends in a hop.
    pub(super) fn sends(self, hop: usize, rank: usize) -> Option<HopMessage> {
        if self.back {
            self.arriving(self.hops() - 1 - hop, rank)
        } else {
            self.leaving(hop, rank)
        }
    }

    /// Returns the message that a rank receives in a hop.
    pub(super) fn receives(self, hop: usize, rank: usize) -> Option<HopMessage> {
        self.reversed().sends(self.hops() - 1 - hop, rank)
    }

    /// Returns the places that stay on their rank in a hop.
    pub(super) fn own(self, hop: usize, rank: usize) -> Vec<Range<usize>> {
        let hop = if self.back {
            self.hops() - 1 - hop
        } else {
            hop
        };
        self.places(rank + self.ranks - hop, hop + 1)
    }

    /// Returns what a rank sends to the next one on the way there.
    fn leaving(self, hop: usize, rank: usize) -> Option<HopMessage> {
        (self.ranks > 1).then(|| HopMessage {
            peer: (rank + 1) % self.ranks,
            places: self.places(rank + 1, self.ranks - 1 - hop),
        })
    }

    /// Returns the same message on the rank that receives it. The first block has arrived, so it
    /// takes the place of its source; all others keep theirs.
    fn arriving(self, hop: usize, rank: usize) -> Option<HopMessage> {
        (self.ranks > 1).then(|| HopMessage {
            peer: (rank + self.ranks - 1) % self.ranks,
            places: [
                self.places(rank + self.ranks - 1 - hop, 1),
                self.places(rank + 1, self.ranks - 2 - hop),
            ]
            .concat(),
        })
    }

    /// Returns consecutive places around the ring, each by itself, because the two sides of a
    /// message number one of its places differently.
    fn places(self, first: usize, count: usize) -> Vec<Range<usize>> {
        let places = (first..first + count).map(|place| place % self.ranks);
        places.map(|place| place..place + 1).collect()
    }
}
