//! The count exchange: ranks learn the size of everything that passes through them.

use super::hop_order::HopMessage;
use super::{BufferRef, CollectivePlan, Copy, HopOrder, HopSchedule, Message, ScheduleStep, Span};
use std::ops::Range;

const NUMBER: usize = 8;

/// The units (rows, bytes) of every block that a rank sends, forwards or receives. It serves any
/// number of exchanges, in both directions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HopCounts {
    hops: HopOrder,
    rank: usize,
    blocks_per_peer: usize,
    /// In the layout of [`HopSchedule::sizes`].
    numbers: Vec<Vec<Vec<u64>>>,
}

/// One block of an exchange: rows that go from one rank to another, such as those of one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBlock {
    /// The rank that sends it.
    pub from: usize,
    /// The rank that receives it.
    pub to: usize,
    /// Its index among the blocks between these two ranks.
    pub index: usize,
    /// Its units, as exchanged.
    pub units: u64,
}

impl HopCounts {
    /// Reads the scratch memory that [`count_hops`] has filled.
    pub fn read(hops: HopOrder, rank: usize, blocks_per_peer: usize, scratch: &[u8]) -> HopCounts {
        let tables = Tables::new(&hops, blocks_per_peer);
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
            blocks_per_peer,
        }
    }

    /// Returns the units of the blocks from each rank, rank after rank.
    pub fn received(&self) -> &[u64] {
        &self.numbers[0][self.hops.count()]
    }

    /// Returns the units of the blocks to each rank, rank after rank.
    pub fn sent(&self) -> &[u64] {
        &self.numbers[0][0]
    }

    /// Returns the number of blocks from one rank to another.
    pub fn blocks_per_peer(&self) -> usize {
        self.blocks_per_peer
    }

    /// Returns the units of the blocks at a place, after `hops` hops of the first order.
    pub fn passing(&self, hops: usize, place: usize) -> impl Iterator<Item = u64> {
        let range = place * self.blocks_per_peer..(place + 1) * self.blocks_per_peer;
        self.numbers[0][hops][range].iter().copied()
    }

    /// Returns the counts of an exchange of some chunks: for each pair of ranks, all blocks of
    /// the first chunk, then those of the next. `rows_of_chunk` returns the units of a block that a chunk
    /// covers.
    #[must_use]
    pub fn in_parts(
        &self,
        numbers: Range<usize>,
        rows_of_chunk: &dyn Fn(usize, RowBlock) -> Range<usize>,
    ) -> HopCounts {
        let pair = |blocks: Vec<RowBlock>| -> Vec<u64> {
            let part = |number: usize| {
                blocks
                    .iter()
                    .map(move |block| rows_of_chunk(number, *block).len() as u64)
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
            blocks_per_peer: self.blocks_per_peer * numbers.len(),
            numbers: (0..self.numbers.len()).map(stages).collect(),
        }
    }

    /// Returns the places that hold blocks after `hops` hops.
    fn places(&self, order: usize, hops: usize) -> Range<usize> {
        0..self.numbers[order][hops].len() / self.blocks_per_peer.max(1)
    }

    /// Returns the blocks at a place after `hops` hops of one order.
    pub(super) fn blocks(
        &self,
        order: usize,
        hops: usize,
        place: usize,
    ) -> impl Iterator<Item = RowBlock> + '_ {
        // Places are relative to the holder; only the pair says whose block it is.
        let (from, to) = self.hops.pair(order, hops, self.rank, place);
        let first = place * self.blocks_per_peer;
        let units = self.numbers[order][hops][first..first + self.blocks_per_peer].iter();
        units.enumerate().map(move |(index, &units)| RowBlock {
            from,
            to,
            index,
            units,
        })
    }

    /// Returns the schedule in which each block has the given bytes.
    pub fn there(&self, bytes: &dyn Fn(RowBlock) -> usize) -> HopSchedule {
        self.schedule(self.hops.clone(), false, bytes)
    }

    /// Returns the schedule that sends every block back to its sender through the same ranks,
    /// with the given bytes.
    pub fn back(&self, bytes: &dyn Fn(RowBlock) -> usize) -> HopSchedule {
        let reversed_block = |block: RowBlock| {
            bytes(RowBlock {
                from: block.to,
                to: block.from,
                ..block
            })
        };
        self.schedule(self.hops.back(), true, &reversed_block)
    }

    fn schedule(
        &self,
        hops: HopOrder,
        reversed: bool,
        size: &dyn Fn(RowBlock) -> usize,
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
            // The way back starts where the way there ended.
            if reversed {
                tables.reverse();
            }
            tables
        };
        HopSchedule {
            sizes: (0..self.hops.orders.len()).map(stages).collect(),
            hops,
            rank: self.rank,
            blocks_per_peer: self.blocks_per_peer,
        }
    }
}

/// The layout of the count tables in scratch: one table for each order and number of hops, in it
/// one row of blocks for each place.
struct Tables {
    row: usize,
    table: usize,
    stages: usize,
}

impl Tables {
    fn new(hops: &HopOrder, blocks_per_peer: usize) -> Tables {
        let row = blocks_per_peer * NUMBER;
        Tables {
            row,
            table: row * hops.ranks(),
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
        Span::new(BufferRef::Scratch, start..end)
    }
}

/// Plans the count exchange: every rank sends the sizes of its blocks along the path of the
/// blocks. `units[q * blocks_per_peer + i]` is block `i` for rank `q`. [`HopCounts::read`] reads the
/// result from scratch.
pub fn count_hops(
    hops: &HopOrder,
    rank: usize,
    blocks_per_peer: usize,
    units: &[u64],
) -> CollectivePlan {
    let tables = Tables::new(hops, blocks_per_peer);
    let orders = 0..hops.orders.len();
    // Each order starts from the same counts but moves them along its own hops, so each has
    // tables of its own.
    let write = |order| ScheduleStep::Write(tables.of(order, 0).start, units.to_vec());
    let mut steps: Vec<ScheduleStep> = orders.clone().map(write).collect();
    for hop in 0..hops.count() {
        let (mut sends, mut receives, mut copies) = (Vec::new(), Vec::new(), Vec::new());
        for order in orders.clone() {
            let messages = |stage, HopMessage { peer, places }| -> Vec<Message> {
                let message = |places| Message {
                    peer,
                    span: tables.rows(order, stage, places),
                };
                places.iter().map(message).collect()
            };
            let (out, inward) = (
                hops.sends(order, hop, rank),
                hops.receives(order, hop, rank),
            );
            sends.extend(out.into_iter().flat_map(|to| messages(hop, to)));
            receives.extend(inward.into_iter().flat_map(|from| messages(hop + 1, from)));
            copies.extend(stay(hops, &tables, (order, hop), rank));
        }
        let name = "counts";
        let phase = hop as u32;
        steps.push(ScheduleStep::Exchange {
            phase,
            name,
            sends,
            receives,
            copies,
        });
    }
    let scratch = tables.of(hops.orders.len(), 0).start;
    CollectivePlan { scratch, steps }
}

/// Returns the copies of the counts that a hop leaves on this rank.
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
            to: to.buffer,
            offset: to.offset,
        }
    })
}
