//! Overlap: how the rows of an exchange are split into chunks, so that the experts multiply one
//! chunk while others are in flight.

use crate::Both;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// The rule by which rows are split into chunks.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum OverlapBy {
    /// An equal part of the rows that each rank has for each expert. Every chunk takes as many
    /// messages as an exchange without chunks.
    #[default]
    Rows,
    /// All rows between ranks at some distances: first the rows that a rank has for its own
    /// experts, then those for the next groups of ranks, as in FasterMoE's smart schedule. Every
    /// message belongs to one chunk.
    Peers,
}

/// The overlap of a pass: how many chunks, and what makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// The number of chunks in each pass.
    pub degree: Both<usize>,
    /// The rule by which rows are split, in both passes.
    pub by: OverlapBy,
}

impl Overlap {
    /// Returns the least number of chunks that evenly divides into the chunks of both forward and
    /// backward.
    pub fn common(self) -> usize {
        let Both { forward, backward } = self.degree;
        match self.by {
            OverlapBy::Peers if forward > 1 && backward > 1 => {
                // The first chunk is a rank's own rows however many chunks there are, so only the
                // others have to agree.
                1 + multiple(forward - 1, backward - 1)
            }
            _ => multiple(forward, backward),
        }
    }
}

/// Returns the least common multiple.
fn multiple(of: usize, and: usize) -> usize {
    let (mut a, mut b) = (of, and);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    // Divided first, so that the numbers that a user typed cannot overflow.
    of / a.max(1) * and
}

/// The distance from a rank to an expert: the number of `ep` groups from one to the other, counted
/// upwards and around.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Distance {
    /// The number of groups in between; 0 is the rank's own group.
    pub steps: usize,
    /// The number of groups.
    pub groups: usize,
}

impl Distance {
    /// Returns the distance from one group to another.
    pub fn between(from: usize, to: usize, groups: usize) -> Distance {
        let steps = (to + groups - from) % groups;
        Distance { steps, groups }
    }
}

/// One chunk of an exchange's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Chunk {
    /// The index of the chunk, from 0.
    pub number: usize,
    /// The number of chunks.
    pub of: usize,
    /// The rule by which rows are split.
    pub by: OverlapBy,
}

impl Chunk {
    /// Returns this chunk's range of the `n` rows that a rank has for an expert at a distance. With
    /// [`OverlapBy::Rows`] the range is `[number * n / of, (number + 1) * n / of)`.
    #[doc(hidden)]
    pub fn rows(&self, n: usize, distance: Distance) -> Range<usize> {
        match self.by {
            OverlapBy::Rows => self.part(n),
            OverlapBy::Peers if self.distances(distance.groups).contains(&distance.steps) => 0..n,
            OverlapBy::Peers => 0..0,
        }
    }

    /// Returns the distances whose rows this chunk has with [`OverlapBy::Peers`], among `groups`
    /// groups. The first chunk has distance 0 alone; the others share the rest as evenly as
    /// possible.
    pub fn distances(&self, groups: usize) -> Range<usize> {
        self.behind_first(groups)
    }

    /// Returns the indices of the common chunks that this chunk consists of, among `units` in all
    /// ([`Overlap::common`]).
    #[doc(hidden)]
    pub fn units(&self, units: usize) -> Range<usize> {
        match self.by {
            OverlapBy::Rows => self.part(units),
            OverlapBy::Peers => self.behind_first(units),
        }
    }

    /// Returns this chunk's range of `n` items that all chunks share as evenly as possible.
    pub fn part(&self, n: usize) -> Range<usize> {
        let edge = |number: usize| (number as u128 * n as u128 / self.of as u128) as usize;
        edge(self.number)..edge(self.number + 1)
    }

    /// Returns this chunk's range of `n` items when the first chunk takes the first item alone and
    /// the others split the rest.
    fn behind_first(&self, n: usize) -> Range<usize> {
        match (self.number, self.of) {
            (_, 1) => 0..n,
            (0, _) => 0..1,
            (number, of) => {
                let edge = |number: usize| 1 + number * n.saturating_sub(1) / (of - 1);
                edge(number - 1)..edge(number)
            }
        }
    }
}

impl fmt::Display for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.number + 1, self.of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that every distance is in one chunk and that the chunks of both passes consist of
    /// common ones.
    #[test]
    fn chunks_by_peers_have_every_distance_once_and_nest() {
        for (forward, backward) in [(1, 1), (1, 4), (2, 2), (2, 4), (3, 4), (8, 2), (5, 3)] {
            let degree = Both { forward, backward };
            let by = OverlapBy::Peers;
            let common = Overlap { degree, by }.common();
            for groups in [1, 2, 3, 7, 16] {
                let distances = |number, of| Chunk { number, of, by }.distances(groups);
                for of in [forward, backward] {
                    let all: Vec<usize> = (0..of).flat_map(|n| distances(n, of)).collect();
                    assert!(all.into_iter().eq(0..groups), "{of} chunks of {groups}");
                    for number in 0..of {
                        let units = Chunk { number, of, by }.units(common);
                        let parts = units.flat_map(|unit| distances(unit, common));
                        assert!(parts.eq(distances(number, of)));
                    }
                }
            }
        }
    }

    #[test]
    fn distances_are_counted_upwards_and_around() {
        let steps = |from, to| Distance::between(from, to, 4).steps;
        assert_eq!((steps(1, 1), steps(3, 0), steps(0, 3)), (0, 1, 3));
        let own = Chunk {
            number: 0,
            of: 3,
            by: OverlapBy::Peers,
        };
        let rows = |chunk: Chunk, to| chunk.rows(10, Distance::between(1, to, 4));
        assert_eq!((rows(own, 1), rows(own, 2)), (0..10, 0..0));
        let far = Chunk { number: 2, ..own };
        assert_eq!(
            (rows(far, 1), rows(far, 2), rows(far, 0)),
            (0..0, 0..0, 0..10)
        );
    }
}
