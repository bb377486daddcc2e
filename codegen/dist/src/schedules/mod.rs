//! Schedules: the messages of a collective, as data.
//!
//! A plan lists the steps of one rank in one operation. It depends on ranks, sizes and the shape
//! of nodes alone, and names neither a transport nor an address. Tests execute the plans of all
//! ranks in memory.

mod agree;
mod algorithm;
mod dedup_combine;
mod dedup_dispatch;
mod element;
mod exchange;
mod hop_counts;
mod hop_order;
mod over_hops;
mod packed;
mod reduce;
mod ring;
mod schedule;
mod trees;

pub use agree::{agreement, sizes};
pub use algorithm::Algorithm;
pub use dedup_combine::{AddendRow, DedupCombine, IntraNodeCombine};
pub use dedup_dispatch::{DedupDispatch, DedupMap, RowBytes, dedup_indices};
pub use element::{CommElement, Reduction};
pub use exchange::{all_gather, all_to_all, exchange};
pub use hop_counts::{HopCounts, RowBlock, count_hops};
pub use hop_order::{HopOrder, HopSchedule};
pub use over_hops::{Endpoints, all_to_all_with, exchange_over_hops, exchange_with};
pub use reduce::{ONE_PHASE_BYTES, all_reduce, reduce_scatter};
pub use ring::Ring;
pub use schedule::{Schedule, ScheduleError};
pub use trees::{barrier, broadcast};

use std::ops::Range;

/// One of the buffers of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BufferRef {
    /// A buffer that the caller provides, by number; only read.
    Input(usize),
    /// A buffer that the caller receives, by number.
    Output(usize),
    /// The operation's own memory.
    Scratch,
}

/// A contiguous range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The buffer.
    pub buffer: BufferRef,
    /// The offset of the first byte.
    pub offset: usize,
    /// The length.
    pub bytes: usize,
}

impl Span {
    /// Returns bytes `range` of a buffer.
    pub fn new(buffer: BufferRef, range: Range<usize>) -> Span {
        Span {
            buffer,
            offset: range.start,
            bytes: range.end - range.start,
        }
    }
}

/// A rank together with the size of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupRank {
    /// The rank, from 0.
    pub rank: usize,
    /// The number of ranks in the group.
    pub size: usize,
}

/// A message to or from another rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// The other rank, in the group.
    pub peer: usize,
    /// The memory that is sent or received into.
    pub span: Span,
}

/// A copy on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// The source.
    pub from: Span,
    /// The destination buffer.
    pub to: BufferRef,
    /// The offset of the first byte there.
    pub offset: usize,
}

/// One step of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScheduleStep {
    /// Messages that are in flight together. The next step begins when all of them have been sent
    /// and received.
    Exchange {
        /// The number of the exchange, equal on the ranks that take part; ascending within a
        /// plan.
        phase: u32,
        /// The name of the exchange in errors.
        name: &'static str,
        /// The messages from this rank. Those to one rank are received in this order.
        sends: Vec<Message>,
        /// The messages to this rank.
        receives: Vec<Message>,
        /// Copies to make while messages are in flight.
        copies: Vec<Copy>,
    },
    /// Copies on this rank, in any order.
    Repack(Vec<Copy>),
    /// Writes 64-bit numbers into scratch, from a byte offset on.
    Write(usize, Vec<u64>),
    /// Folds rows in scratch, one per rank in rank order.
    Reduce {
        /// The element type.
        element: CommElement,
        /// The operator.
        reduction: Reduction,
        /// The range of all rows.
        rows: Range<usize>,
        /// The bytes of one row.
        row_bytes: usize,
        /// The destination buffer.
        to: BufferRef,
        /// The offset of the first byte there.
        offset: usize,
    },
    /// Compares 64-bit numbers from other ranks with the expected ones.
    Check {
        /// The compared property: `bytes for this rank`.
        what: &'static str,
        /// The numbers to compare.
        numbers: Vec<ExpectedCount>,
    },
}

/// A number that must arrive in scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpectedCount {
    /// The offset of its first byte in scratch.
    pub offset: usize,
    /// The value that it must have.
    pub value: u64,
    /// The rank that sends it, in the group.
    pub peer: usize,
}

/// The steps of one rank in one operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CollectivePlan {
    /// The size of scratch in bytes.
    pub scratch: usize,
    /// The steps, executed one after the other.
    pub steps: Vec<ScheduleStep>,
}

impl CollectivePlan {
    /// Returns the number of messages that this rank sends.
    pub fn messages(&self) -> usize {
        self.sends().count()
    }

    /// Returns the bytes that this rank sends to ranks for which `counted` is true.
    pub fn bytes_to(&self, counted: impl Fn(usize) -> bool) -> usize {
        let sends = self.sends().filter(|message| counted(message.peer));
        sends.map(|message| message.span.bytes).sum()
    }

    /// Returns whether the plan only moves bytes.
    pub fn only_moves(&self) -> bool {
        let moves = |step: &ScheduleStep| {
            matches!(
                step,
                ScheduleStep::Exchange { .. } | ScheduleStep::Repack(_)
            )
        };
        self.steps.iter().all(moves)
    }

    /// Returns peer and bytes of the messages from and to this rank, in order.
    pub fn traffic(&self) -> [Vec<(usize, usize)>; 2] {
        let steps = || {
            self.steps.iter().filter_map(|step| match step {
                ScheduleStep::Exchange {
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
            ScheduleStep::Exchange { sends, .. } => sends.as_slice(),
            _ => &[],
        })
    }
}

/// Returns the offsets of consecutive parts of these sizes, and their end.
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

/// Returns the other ranks, the next one first. Starting at a different rank everywhere keeps any
/// single rank from being every rank's first receiver.
pub(crate) fn others(rank: usize, size: usize) -> impl Iterator<Item = usize> {
    (1..size).map(move |distance| (rank + distance) % size)
}
