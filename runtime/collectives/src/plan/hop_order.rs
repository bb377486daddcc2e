//! Ways over other ranks: a rank is a number of several digits, and what goes from rank
//! `p` to rank `q` gets the digits of `q` one after the other, in some order.
//!
//! After some hops a rank `r` holds what goes from `p` to `q` if `q` has the digits of `r`
//! at levels that are done, and `p` at all others. The digits that are left are a number
//! again, the *place* of the pair at `r`: digits of `p` at levels that are done, of `q` at
//! all others. So a rank holds as many pairs at any time as there are ranks. At first
//! places are the ranks that parts go to; at last those they come from. A hop at a level
//! takes place `f` of rank `r` to the place with the digit of `r`, of the rank with the
//! digit of `f`.

use super::{offsets, others};
use crate::{Levels, NodeShape};
use std::ops::Range;

/// In which order parts get the digits of their ranks. With several orders each part is cut
/// into as many shares, one for each, which travel side by side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HopOrder {
    /// The digits.
    pub levels: Levels,
    /// Of each share its levels, each dedup_dispatch.
    pub orders: Vec<Vec<usize>>,
}

/// Of a digit's number of values in [`HopOrder::code`]; the first level's follows from the ranks.
const RADIX_BITS: u64 = 18;

/// Cuts are at multiples of so many bytes of a piece.
const CUT: usize = 16;

impl HopOrder {
    /// Everything straight to where it goes.
    pub fn direct(ranks: usize) -> Option<HopOrder> {
        let levels = Levels::new(&[ranks])?;
        Some(HopOrder::one(levels, vec![0]))
    }

    /// Inside nodes first, then between nodes.
    pub fn intra_first(shape: NodeShape) -> HopOrder {
        HopOrder::one(shape.into(), vec![1, 0])
    }

    /// Between nodes first, then inside nodes.
    pub fn inter_first(shape: NodeShape) -> HopOrder {
        HopOrder::one(shape.into(), vec![0, 1])
    }

    /// One half each way, so that both kinds of links are busy all the time.
    pub fn concurrent(shape: NodeShape) -> HopOrder {
        HopOrder {
            levels: shape.into(),
            orders: vec![vec![1, 0], vec![0, 1]],
        }
    }

    /// The smallest groups first.
    pub fn upwards(levels: Levels) -> HopOrder {
        HopOrder::one(levels, (0..levels.count()).rev().collect())
    }

    fn one(levels: Levels, order: Vec<usize>) -> HopOrder {
        HopOrder {
            levels,
            orders: vec![order],
        }
    }

    /// The same ways in the other direction.
    #[must_use]
    pub fn back(&self) -> HopOrder {
        let orders = self.orders.iter();
        HopOrder {
            orders: orders
                .map(|order| order.iter().rev().copied().collect())
                .collect(),
            ..*self
        }
    }

    /// The ways as a number, of which [`HopOrder::words`] makes words; 0 is everything straight.
    pub(crate) fn code(&self) -> u64 {
        let levels = &self.levels;
        if levels.count() == 1 {
            return 0;
        }
        let radices = (1..levels.count()).map(|level| levels.radix(level) as u64);
        let radices = radices
            .rev()
            .fold(0, |code, radix| code << RADIX_BITS | radix);
        let (ways, first) = (self.orders.len() as u64, self.orders[0][0] as u64);
        ((radices << 2 | first) << 3 | ways) << 3 | levels.count() as u64
    }

    /// What a [`HopOrder::code`] means.
    pub(crate) fn words(code: u64) -> String {
        let (count, ways, first) = (code & 7, code >> 3 & 7, code >> 6 & 3);
        let radix = |level: u64| code >> 8 >> (RADIX_BITS * (level - 1)) & ((1 << RADIX_BITS) - 1);
        match (count, ways, first) {
            (0, ..) => "direct".to_string(),
            (2, 1, 1) => format!("hierarchical with {} ranks per node", radix(1)),
            (2, 1, _) => format!(
                "hierarchical between nodes first with {} ranks per node",
                radix(1)
            ),
            (2, ..) => format!(
                "hierarchical both ways at dedup_dispatch with {} ranks per node",
                radix(1)
            ),
            _ => {
                let below: Vec<String> = (1..count).map(|level| radix(level).to_string()).collect();
                let start = if first == 0 { "largest" } else { "smallest" };
                format!("levels of groups of {}, {start} first", below.join("x"))
            }
        }
    }

    /// How many hops a part takes at most.
    pub fn count(&self) -> usize {
        self.levels.count()
    }

    /// What a hop is called in errors.
    pub(super) fn name(&self, hop: usize) -> &'static str {
        let mut levels = self.orders.iter().map(|order| order[hop]);
        match (self.orders.len(), self.count(), levels.next()) {
            (1, 1, _) => "exchange",
            (1, 2, Some(0)) => "inter-node exchange",
            (1, 2, Some(1)) => "intra-node exchange",
            (1, _, Some(0)) => "exchange at level 0",
            (1, _, Some(1)) => "exchange at level 1",
            (1, _, Some(2)) => "exchange at level 2",
            (1, _, Some(_)) => "exchange at level 3",
            _ => "intra-node and inter-node exchange",
        }
    }

    /// From where to where the pair at a place of a rank goes, after so many hops.
    pub fn pair(&self, order: usize, hops: usize, rank: usize, place: usize) -> (usize, usize) {
        let (mut from, mut to) = (rank, place);
        for &level in &self.orders[order][..hops] {
            let (own, other) = (
                self.levels.digit(rank, level),
                self.levels.digit(place, level),
            );
            from = self.levels.with(from, level, other);
            to = self.levels.with(to, level, own);
        }
        (from, to)
    }

    /// The ranks that a rank exchanges with in a hop, each with the places that change hands:
    /// the same numbers on both sides.
    pub(super) fn peers(
        &self,
        order: usize,
        hop: usize,
        rank: usize,
    ) -> impl Iterator<Item = (usize, Vec<Range<usize>>)> {
        let (levels, level) = (self.levels, self.orders[order][hop]);
        let own = levels.digit(rank, level);
        others(own, levels.radix(level)).map(move |digit| {
            let peer = levels.with(rank, level, digit);
            (peer, places(&levels, level, digit))
        })
    }

    /// The places that a hop leaves where they are.
    pub(super) fn own(&self, order: usize, hop: usize, rank: usize) -> Vec<Range<usize>> {
        let level = self.orders[order][hop];
        places(&self.levels, level, self.levels.digit(rank, level))
    }

    /// The bytes of a piece that take one of the ways. What needs one hop alone goes whole,
    /// by the way that begins with it.
    pub(super) fn share(
        &self,
        order: usize,
        (from, to): (usize, usize),
        bytes: usize,
    ) -> Range<usize> {
        let ways = self.orders.len();
        if ways == 1 {
            return 0..bytes;
        }
        let whole = |own: bool| if own { 0..bytes } else { 0..0 };
        let differs =
            |level: &usize| self.levels.digit(from, *level) != self.levels.digit(to, *level);
        let differing: Vec<usize> = (0..self.count()).filter(differs).collect();
        match differing[..] {
            [] => whole(order == 0),
            [level] => {
                let first = self.orders.iter().position(|order| order[0] == level);
                whole(first.unwrap_or(0) == order)
            }
            _ => {
                let cut = |way: usize| {
                    if way == ways {
                        bytes
                    } else {
                        bytes * way / ways / CUT * CUT
                    }
                };
                cut(order)..cut(order + 1)
            }
        }
    }
}

/// Numbers with a digit at a level, as ranges.
fn places(levels: &Levels, level: usize, digit: usize) -> Vec<Range<usize>> {
    let stride = levels.stride(level);
    let each = stride * levels.radix(level);
    let first = |group: usize| group * each + digit * stride;
    let groups = 0..levels.ranks() / each;
    groups
        .map(|group| first(group)..first(group) + stride)
        .collect()
}

/// How many bytes every piece has that a rank sends, passes on or gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HopSchedule {
    /// The ways.
    pub hops: HopOrder,
    /// This rank.
    pub rank: usize,
    /// Pieces of a part.
    pub pieces: usize,
    /// By order, by the number of hops that were made, by place, by piece. Shares are not
    /// cut yet.
    pub sizes: Vec<Vec<Vec<usize>>>,
}

impl HopSchedule {
    /// Parts of one piece each, all of one size.
    pub fn equal(hops: HopOrder, rank: usize, bytes: usize) -> HopSchedule {
        let places = vec![bytes; hops.levels.ranks()];
        let stages = vec![places; hops.count() + 1];
        HopSchedule {
            rank,
            pieces: 1,
            sizes: vec![stages; hops.orders.len()],
            hops,
        }
    }

    /// Bytes of the pieces that go to a rank.
    pub fn sent(&self, peer: usize) -> &[usize] {
        self.of(0, 0, peer)
    }

    /// Bytes of the pieces that come from a rank.
    pub fn received(&self, peer: usize) -> &[usize] {
        self.of(0, self.hops.count(), peer)
    }

    /// Bytes of the pieces at a place after so many hops.
    pub(super) fn of(&self, order: usize, hops: usize, place: usize) -> &[usize] {
        &self.sizes[order][hops][place * self.pieces..(place + 1) * self.pieces]
    }

    /// Pieces of one size each, one after the other: where they begin, and their end.
    pub fn starts(sizes: &[usize]) -> Vec<usize> {
        offsets(sizes)
    }
}
