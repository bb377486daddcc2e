//! Paths over intermediate ranks. A rank is a number with several digits; data from rank `p` to
//! rank `q` replace the digits of `p` by those of `q` one at a time, in some order of levels.
//!
//! After some hops, rank `r` holds the data from `p` to `q` if `q` has the digits of `r` at
//! finished levels, and `p` has them at all others. The remaining digits form a number too, the
//! *place* of the pair at `r`: the digits of `p` at finished levels, of `q` at all others. So a
//! rank holds as many pairs at any time as there are ranks. Before the first hop, places are
//! destination ranks; after the last, source ranks. A hop at a level moves place `f` of rank `r`
//! to the rank that has the digit of `f`, into the place that has the digit of `r`.

use super::hop_message::HopMessage;
use super::{Ring, offsets, others};
use crate::{Levels, NodeShape};
use std::ops::Range;

/// The order in which data take the digits of their destination. With several orders, every block
/// is split into one share per order, and the shares move concurrently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HopOrder {
    /// The digits of a rank.
    pub levels: Levels,
    /// The levels of each share in hop order; each level appears once.
    pub orders: Vec<Vec<usize>>,
    /// The ring around which data pass instead of taking digits. Ranks then have one level.
    pub ring: Option<Ring>,
}

/// The bits of a digit's radix in [`HopOrder::code`]. The first level's radix follows from the
/// number of ranks.
const RADIX_BITS: u64 = 18;

/// The granularity of shares in bytes, so that shares of a block stay aligned.
const SHARE_ALIGNMENT: usize = 16;

impl HopOrder {
    /// Returns direct messages.
    pub fn direct(ranks: usize) -> Option<HopOrder> {
        let levels = Levels::new(&[ranks])?;
        Some(HopOrder::one(levels, vec![0]))
    }

    /// Returns hops inside nodes first, then between nodes.
    pub fn intra_first(shape: NodeShape) -> HopOrder {
        HopOrder::one(shape.into(), vec![1, 0])
    }

    /// Returns hops between nodes first, then inside nodes.
    pub fn inter_first(shape: NodeShape) -> HopOrder {
        HopOrder::one(shape.into(), vec![0, 1])
    }

    /// Returns one share in each order, so that both kinds of links are always busy.
    pub fn concurrent(shape: NodeShape) -> HopOrder {
        HopOrder {
            levels: shape.into(),
            orders: vec![vec![1, 0], vec![0, 1]],
            ring: None,
        }
    }

    /// Returns hops in the smallest groups first.
    pub fn upwards(levels: Levels) -> HopOrder {
        HopOrder::one(levels, (0..levels.count()).rev().collect())
    }

    /// Returns hops around a ring; `None` for no ranks.
    pub fn around(ranks: usize) -> Option<HopOrder> {
        let ring = Some(Ring { ranks, back: false });
        HopOrder::direct(ranks).map(|hops| HopOrder { ring, ..hops })
    }

    fn one(levels: Levels, order: Vec<usize>) -> HopOrder {
        HopOrder {
            levels,
            orders: vec![order],
            ring: None,
        }
    }

    /// Returns the reversed orders.
    #[must_use]
    pub fn back(&self) -> HopOrder {
        let orders = self.orders.iter();
        HopOrder {
            orders: orders
                .map(|order| order.iter().rev().copied().collect())
                .collect(),
            ring: self.ring.map(Ring::reversed),
            ..*self
        }
    }

    /// Returns the order as a number for [`HopOrder::words`]; 0 means direct messages.
    pub fn code(&self) -> u64 {
        let levels = &self.levels;
        // Direct messages have code 0 whatever the number of ranks, since signatures of other
        // operations hold 0 too.
        if levels.count() == 1 {
            return self
                .ring
                .map_or(0, |ring| u64::from(ring.back) << 6 | 1 << 3 | 1);
        }
        let radices = (1..levels.count()).map(|level| levels.radix(level) as u64);
        let radices = radices
            .rev()
            .fold(0, |code, radix| code << RADIX_BITS | radix);
        let (orders, first) = (self.orders.len() as u64, self.orders[0][0] as u64);
        ((radices << 2 | first) << 3 | orders) << 3 | levels.count() as u64
    }

    /// Describes a [`HopOrder::code`].
    pub fn words(code: u64) -> String {
        let (count, orders, first) = (code & 7, code >> 3 & 7, code >> 6 & 3);
        let radix = |level: u64| code >> 8 >> (RADIX_BITS * (level - 1)) & ((1 << RADIX_BITS) - 1);
        match (count, orders, first) {
            (0, ..) => "direct".to_string(),
            (1, _, 0) => "around a ring".to_string(),
            (1, ..) => "around a ring in reverse".to_string(),
            (2, 1, 1) => format!("hierarchical with {} ranks per node", radix(1)),
            (2, 1, _) => format!(
                "hierarchical between nodes first with {} ranks per node",
                radix(1)
            ),
            (2, ..) => format!(
                "hierarchical in both orders at once with {} ranks per node",
                radix(1)
            ),
            _ => {
                let below: Vec<String> = (1..count).map(|level| radix(level).to_string()).collect();
                let start = if first == 0 { "largest" } else { "smallest" };
                format!("levels of groups of {}, {start} first", below.join("x"))
            }
        }
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.levels.ranks()
    }

    /// Returns the number of hops, the most that any data take.
    pub fn count(&self) -> usize {
        self.ring.map_or(self.levels.count(), Ring::hops)
    }

    /// Returns the name of a hop in errors.
    pub(super) fn name(&self, hop: usize) -> &'static str {
        if self.ring.is_some() {
            return "exchange with neighbours on the ring";
        }
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

    /// Returns source and destination of the pair at a place of a rank, after `hops` hops.
    pub fn pair(&self, order: usize, hops: usize, rank: usize, place: usize) -> (usize, usize) {
        if let Some(ring) = self.ring {
            return ring.pair(hops, rank, place);
        }
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

    /// Returns the ranks that a rank sends to in a hop, each with the places whose blocks leave, in
    /// the order in which the receiver expects them.
    pub(super) fn sends(&self, order: usize, hop: usize, rank: usize) -> Vec<HopMessage> {
        if let Some(ring) = self.ring {
            return ring.sends(hop, rank).into_iter().collect();
        }
        let (levels, level) = (self.levels, self.orders[order][hop]);
        let own = levels.digit(rank, level);
        let message = |digit| HopMessage {
            peer: levels.with(rank, level, digit),
            places: places(&levels, level, digit),
        };
        others(own, levels.radix(level)).map(message).collect()
    }

    /// Returns the ranks that a rank receives from in a hop, each with the places that its blocks
    /// take. Together these are the places that [`HopOrder::sends`] empties.
    pub(super) fn receives(&self, order: usize, hop: usize, rank: usize) -> Vec<HopMessage> {
        if let Some(ring) = self.ring {
            return ring.receives(hop, rank).into_iter().collect();
        }
        // Ranks whose numbers differ in one digit exchange, each place for the one of the other's
        // digit.
        self.sends(order, hop, rank)
    }

    /// Returns the places that stay on their rank in a hop.
    pub(super) fn own(&self, order: usize, hop: usize, rank: usize) -> Vec<Range<usize>> {
        if let Some(ring) = self.ring {
            return ring.own(hop, rank);
        }
        let level = self.orders[order][hop];
        places(&self.levels, level, self.levels.digit(rank, level))
    }

    /// Returns the bytes of a block that take one order. A block that needs a single hop goes
    /// whole, in the order that begins with that hop, because splitting it would only add
    /// messages.
    pub(super) fn share(
        &self,
        order: usize,
        (from, to): (usize, usize),
        bytes: usize,
    ) -> Range<usize> {
        let orders = self.orders.len();
        if orders == 1 {
            return 0..bytes;
        }
        // Every byte must belong to exactly one order, so blocks that are not split go entirely
        // to one.
        let whole = |own: bool| if own { 0..bytes } else { 0..0 };
        let differs =
            |level: &usize| self.levels.digit(from, *level) != self.levels.digit(to, *level);
        // The hops that a block needs are the levels at which its two ranks differ.
        let differing: Vec<usize> = (0..self.count()).filter(differs).collect();
        match differing[..] {
            [] => whole(order == 0),
            [level] => {
                let first = self.orders.iter().position(|order| order[0] == level);
                whole(first.unwrap_or(0) == order)
            }
            _ => {
                let start = |index: usize| {
                    if index == orders {
                        bytes
                    } else {
                        bytes * index / orders / SHARE_ALIGNMENT * SHARE_ALIGNMENT
                    }
                };
                start(order)..start(order + 1)
            }
        }
    }
}

/// Returns the numbers with this digit at a level, as ranges.
fn places(levels: &Levels, level: usize, digit: usize) -> Vec<Range<usize>> {
    let stride = levels.stride(level);
    let each = stride * levels.radix(level);
    let first = |group: usize| group * each + digit * stride;
    let groups = 0..levels.ranks() / each;
    groups
        .map(|group| first(group)..first(group) + stride)
        .collect()
}

/// The bytes of every block that a rank sends, forwards or receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HopSchedule {
    /// The orders of hops.
    pub hops: HopOrder,
    /// This rank.
    pub rank: usize,
    /// The number of blocks from one rank to another.
    pub blocks_per_peer: usize,
    /// By order, number of hops made, place and block. Sizes are of whole blocks, before the
    /// split into shares.
    pub sizes: Vec<Vec<Vec<usize>>>,
}

impl HopSchedule {
    /// Returns the schedule of one block per pair, all of one size.
    pub fn equal(hops: HopOrder, rank: usize, bytes: usize) -> HopSchedule {
        let places = vec![bytes; hops.ranks()];
        let stages = vec![places; hops.count() + 1];
        HopSchedule {
            rank,
            blocks_per_peer: 1,
            sizes: vec![stages; hops.orders.len()],
            hops,
        }
    }

    /// Returns the bytes of the blocks to a rank.
    pub fn sent(&self, peer: usize) -> &[usize] {
        self.of(0, 0, peer)
    }

    /// Returns the bytes of the blocks from a rank.
    pub fn received(&self, peer: usize) -> &[usize] {
        self.of(0, self.hops.count(), peer)
    }

    /// Returns the bytes of the blocks at a place after `hops` hops.
    pub(super) fn of(&self, order: usize, hops: usize, place: usize) -> &[usize] {
        &self.sizes[order][hops][place * self.blocks_per_peer..(place + 1) * self.blocks_per_peer]
    }

    /// Returns the offsets of consecutive blocks, and their end.
    pub fn starts(sizes: &[usize]) -> Vec<usize> {
        offsets(sizes)
    }
}
