//! Operations as data: which bytes go where, in which order.
//!
//! A plan is what one rank does in one operation. It follows from ranks, sizes and
//! the shape of nodes alone; nothing in it names an transport or an address.

mod agree;
mod dedup_combine;
mod dedup_dispatch;
mod exchange;
mod hop_counts;
mod hop_order;
mod over_hops;
mod packed;
mod reduce;
mod schedule;
mod trees;

pub use agree::{agreement, sizes};
pub use dedup_combine::{DedupCombine, IntraNodeCombine};
pub use dedup_dispatch::{DedupDispatch, DedupMap, RowBytes, dedup_indices};
pub use exchange::{all_gather, all_to_all, exchange};
pub use hop_counts::{Block, HopCounts, count_hops};
pub use hop_order::{HopOrder, HopSchedule};
pub use over_hops::{Endpoints, all_to_all_with, exchange_with, routed};
pub use reduce::{ONE_PHASE_BYTES, all_reduce, reduce_scatter};
pub use schedule::Schedule;
pub use trees::{barrier, broadcast};

use crate::{Element, Reduction};
use std::ops::Range;

/// One of the pieces of memory of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// What the caller gives, by number; only read.
    Input(usize),
    /// What the caller gets, by number.
    Output(usize),
    /// The operation's own memory.
    Scratch,
}

/// Bytes in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Which memory.
    pub place: Place,
    /// The first byte in it.
    pub offset: usize,
    /// How many.
    pub bytes: usize,
}

impl Span {
    /// Bytes `range` of `place`.
    pub fn new(place: Place, range: Range<usize>) -> Span {
        Span {
            place,
            offset: range.start,
            bytes: range.end - range.start,
        }
    }
}

/// Bytes to or from another rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// The other rank, in the group.
    pub peer: usize,
    /// What is sent, or where it is received.
    pub span: Span,
}

/// Bytes that stay on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Where they are.
    pub from: Span,
    /// Where they go.
    pub to: Place,
    /// The first byte there.
    pub offset: usize,
}

/// One thing after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Messages that travel at dedup_dispatch. The next step begins when all have been sent
    /// and received.
    Exchange {
        /// Its number, the same on the ranks that take part; ascending in a plan.
        phase: u32,
        /// What it is, for errors.
        name: &'static str,
        /// Messages from here. Those to one rank are received in this order.
        sends: Vec<Message>,
        /// Messages to here.
        receives: Vec<Message>,
        /// What is copied meanwhile.
        copies: Vec<Copy>,
    },
    /// Copies on this rank, in any order.
    Repack(Vec<Copy>),
    /// Writes 64-bit numbers into the scratch memory, from a byte on.
    Write(usize, Vec<u64>),
    /// Folds rows of the scratch memory, one of each rank in their order.
    Reduce {
        /// What the rows are of.
        element: Element,
        /// How they are folded.
        reduction: Reduction,
        /// All rows.
        rows: Range<usize>,
        /// Bytes of one.
        row_bytes: usize,
        /// Where the result goes.
        to: Place,
        /// The first byte there.
        offset: usize,
    },
    /// Compares 64-bit numbers that came from other ranks with what they must be.
    Check {
        /// What is compared: `bytes for this rank`.
        what: &'static str,
        /// Where they are in the scratch memory, what they must be, and whose they are.
        numbers: Vec<(usize, u64, usize)>,
    },
}

/// What one rank does in one operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Bytes of memory of its own.
    pub scratch: usize,
    /// One after the other.
    pub steps: Vec<Step>,
}

impl Plan {
    /// Messages that this rank sends.
    pub fn messages(&self) -> usize {
        self.sends().count()
    }

    /// Bytes that this rank sends to others for which `counted` is true.
    pub fn bytes_to(&self, counted: impl Fn(usize) -> bool) -> usize {
        let sends = self.sends().filter(|message| counted(message.peer));
        sends.map(|message| message.span.bytes).sum()
    }

    /// Whether it only moves bytes.
    pub(crate) fn only_moves(&self) -> bool {
        let moves = |step: &Step| matches!(step, Step::Exchange { .. } | Step::Repack(_));
        self.steps.iter().all(moves)
    }

    /// Messages from here and to here, by peer and bytes, in their order.
    pub(crate) fn traffic(&self) -> [Vec<(usize, usize)>; 2] {
        let steps = || {
            self.steps.iter().filter_map(|step| match step {
                Step::Exchange {
                    sends, receives, ..
                } => Some((sends, receives)),
                _ => None,
            })
        };
        let list = |messages: &Vec<Message>| -> Vec<(usize, usize)> {
            let sizes = messages.iter();
            sizes
                .map(|message| (message.peer, message.span.bytes))
                .collect()
        };
        [
            steps().flat_map(|(sends, _)| list(sends)).collect(),
            steps().flat_map(|(_, receives)| list(receives)).collect(),
        ]
    }

    fn sends(&self) -> impl Iterator<Item = &Message> {
        self.steps.iter().flat_map(|step| match step {
            Step::Exchange { sends, .. } => sends.as_slice(),
            _ => &[],
        })
    }
}

/// Where parts of these sizes begin when they lie one after the other, and their end.
pub fn offsets(sizes: &[usize]) -> Vec<usize> {
    let mut list = Vec::with_capacity(sizes.len() + 1);
    list.push(0);
    let mut end = 0;
    for size in sizes {
        end += size;
        list.push(end);
    }
    list
}

/// The other ranks, the next one first: no rank is everybody's first.
pub(crate) fn others(rank: usize, size: usize) -> impl Iterator<Item = usize> {
    (1..size).map(move |distance| (rank + distance) % size)
}
