//! Ranks tell each other how much will pass through them.

use super::{Copy, HopOrder, HopSchedule, Message, Place, Plan, Span, Step};
use std::ops::Range;

const NUMBER: usize = 8;

/// How many units (rows, bytes) every piece has that a rank sends, passes on or gets. It
/// serves any number of exchanges, there and back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HopCounts {
    hops: HopOrder,
    rank: usize,
    pieces: usize,
    /// As [`HopSchedule::sizes`].
    numbers: Vec<Vec<Vec<u64>>>,
}

/// One piece of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The rank that has it.
    pub from: usize,
    /// The rank that gets it.
    pub to: usize,
    /// Which of the pieces between these two.
    pub piece: usize,
    /// Its units, as told.
    pub units: u64,
}

impl HopCounts {
    /// What [`count_hops`] has left in the scratch memory.
    pub fn read(hops: HopOrder, rank: usize, pieces: usize, scratch: &[u8]) -> HopCounts {
        let tables = Tables::new(&hops, pieces);
        let table = |order: usize, stage: usize| {
            let bytes = &scratch[tables.of(order, stage)];
            let numbers = bytes.as_chunks::<NUMBER>().0.iter();
            numbers.map(|number| u64::from_le_bytes(*number)).collect()
        };
        let stages = |order: usize| {
            (0..=hops.count())
                .map(|stage| table(order, stage))
                .collect()
        };
        HopCounts {
            numbers: (0..hops.orders.len()).map(stages).collect(),
            hops,
            rank,
            pieces,
        }
    }

    /// Units of the pieces that come from each rank, rank after rank.
    pub fn received(&self) -> &[u64] {
        &self.numbers[0][self.hops.count()]
    }

    /// Units of the pieces that go to each rank, rank after rank.
    pub fn sent(&self) -> &[u64] {
        &self.numbers[0][0]
    }

    /// Pieces of a part.
    pub fn pieces(&self) -> usize {
        self.pieces
    }

    /// Units of the pieces at a place, after so many hops of the first of the ways.
    pub fn passing(&self, hops: usize, place: usize) -> impl Iterator<Item = u64> {
        let pieces = place * self.pieces..(place + 1) * self.pieces;
        self.numbers[0][hops][pieces].iter().copied()
    }

    /// What passes where every piece travels in parts: of each pair of ranks all pieces of
    /// the first part, then those of the next. `cut` says which units a part of this number
    /// has of a piece.
    #[must_use]
    pub fn in_parts(
        &self,
        numbers: Range<usize>,
        cut: &dyn Fn(usize, Block) -> Range<usize>,
    ) -> HopCounts {
        let pair = |blocks: Vec<Block>| -> Vec<u64> {
            let part = |number: usize| {
                blocks
                    .iter()
                    .map(move |block| cut(number, *block).len() as u64)
            };
            numbers.clone().flat_map(part).collect()
        };
        let table = |order: usize, stage: usize| {
            let blocks = |place: usize| self.blocks(order, stage, place).collect();
            let places = self.places(order, stage);
            places.flat_map(|place| pair(blocks(place))).collect()
        };
        let stages = |order: usize| {
            let stages = 0..self.numbers[order].len();
            stages.map(|stage| table(order, stage)).collect()
        };
        HopCounts {
            hops: self.hops.clone(),
            rank: self.rank,
            pieces: self.pieces * numbers.len(),
            numbers: (0..self.numbers.len()).map(stages).collect(),
        }
    }

    /// Places that have pieces after so many hops.
    fn places(&self, order: usize, hops: usize) -> Range<usize> {
        0..self.numbers[order][hops].len() / self.pieces.max(1)
    }

    /// The pieces at a place after so many hops of one of the ways.
    pub(super) fn blocks(
        &self,
        order: usize,
        hops: usize,
        place: usize,
    ) -> impl Iterator<Item = Block> + '_ {
        let (from, to) = self.hops.pair(order, hops, self.rank, place);
        let first = place * self.pieces;
        let units = self.numbers[order][hops][first..first + self.pieces].iter();
        units.enumerate().map(move |(piece, &units)| Block {
            from,
            to,
            piece,
            units,
        })
    }

    /// An exchange in which a piece has so many bytes.
    pub fn there(&self, bytes: &dyn Fn(Block) -> usize) -> HopSchedule {
        self.schedule(self.hops.clone(), false, bytes)
    }

    /// An exchange in which every piece that was told of goes back where it came from, by
    /// the same ranks, in so many bytes.
    pub fn back(&self, bytes: &dyn Fn(Block) -> usize) -> HopSchedule {
        let turned = |block: Block| {
            bytes(Block {
                from: block.to,
                to: block.from,
                ..block
            })
        };
        self.schedule(self.hops.back(), true, &turned)
    }

    fn schedule(
        &self,
        hops: HopOrder,
        reversed: bool,
        size: &dyn Fn(Block) -> usize,
    ) -> HopSchedule {
        let table = |order: usize, stage: usize| -> Vec<usize> {
            let blocks = |place: usize| self.blocks(order, stage, place);
            self.places(order, stage)
                .flat_map(blocks)
                .map(size)
                .collect()
        };
        let stages = |order: usize| {
            let tables = (0..=self.hops.count()).map(|stage| table(order, stage));
            let mut tables: Vec<Vec<usize>> = tables.collect();
            if reversed {
                tables.reverse();
            }
            tables
        };
        HopSchedule {
            sizes: (0..self.hops.orders.len()).map(stages).collect(),
            hops,
            rank: self.rank,
            pieces: self.pieces,
        }
    }
}

/// Where tables of numbers lie in the scratch memory: one for each order and number of hops,
/// a row of pieces for each place.
struct Tables {
    row: usize,
    table: usize,
    stages: usize,
}

impl Tables {
    fn new(hops: &HopOrder, pieces: usize) -> Tables {
        let row = pieces * NUMBER;
        Tables {
            row,
            table: row * hops.levels.ranks(),
            stages: hops.count() + 1,
        }
    }

    fn of(&self, order: usize, stage: usize) -> Range<usize> {
        let first = (order * self.stages + stage) * self.table;
        first..first + self.table
    }

    fn rows(&self, order: usize, stage: usize, places: &Range<usize>) -> Span {
        let first = self.of(order, stage).start;
        let [start, end] = [places.start, places.end].map(|place| first + place * self.row);
        Span::new(Place::Scratch, start..end)
    }
}

/// Every rank tells those on the way of its parts what these are: `units[q * pieces + i]` is
/// piece `i` for rank `q`. The result is a [`HopCounts`] in scratch.
pub fn count_hops(hops: &HopOrder, rank: usize, pieces: usize, units: &[u64]) -> Plan {
    let tables = Tables::new(hops, pieces);
    let orders = 0..hops.orders.len();
    let write = |order| Step::Write(tables.of(order, 0).start, units.to_vec());
    let mut steps: Vec<Step> = orders.clone().map(write).collect();
    for hop in 0..hops.count() {
        let (mut sends, mut receives, mut copies) = (Vec::new(), Vec::new(), Vec::new());
        for order in orders.clone() {
            for (peer, places) in hops.peers(order, hop, rank) {
                let message = |stage, places| Message {
                    peer,
                    span: tables.rows(order, stage, places),
                };
                sends.extend(places.iter().map(|places| message(hop, places)));
                receives.extend(places.iter().map(|places| message(hop + 1, places)));
            }
            copies.extend(stay(hops, &tables, (order, hop), rank));
        }
        let name = "counts";
        let phase = hop as u32;
        steps.push(Step::Exchange {
            phase,
            name,
            sends,
            receives,
            copies,
        });
    }
    let scratch = tables.of(hops.orders.len(), 0).start;
    Plan { scratch, steps }
}

/// Numbers of what a hop leaves where it is.
fn stay<'a>(
    hops: &'a HopOrder,
    tables: &'a Tables,
    (order, hop): (usize, usize),
    rank: usize,
) -> impl Iterator<Item = Copy> + 'a {
    let own = hops.own(order, hop, rank).into_iter();
    own.map(move |places| {
        let to = tables.rows(order, hop + 1, &places);
        Copy {
            from: tables.rows(order, hop, &places),
            to: to.place,
            offset: to.offset,
        }
    })
}
