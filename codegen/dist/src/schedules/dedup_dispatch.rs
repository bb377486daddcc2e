//! Deduplicated dispatch: the rows of one token are equal, so each token crosses to a node once.
//!
//! A rank sends the first row of each token for a node to the rank with its own local rank there.
//! That rank forwards it to every rank of the node that gets a row of the token. Rows for the own
//! node go directly. The received rows equal those of an exchange without deduplication.

use super::ScheduleError;
use super::{
    BufferRef, CollectivePlan, Copy, GroupRank, HopCounts, HopSchedule, Message, RowBlock,
    Schedule, ScheduleStep, Span, others,
};
use crate::{NodeRank, NodeShape};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// The rows that cross between nodes: those of this rank, and those that other ranks send through
/// it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DedupMap {
    shape: NodeShape,
    rank: usize,
    /// The row counts, exchanged between nodes first.
    hop_counts: Arc<HopCounts>,
    /// By node, for each row to that node (by rank, then in block order), the number of the
    /// crossing row that carries it. Crossing rows are numbered by first appearance.
    sent: Vec<Vec<u32>>,
    /// The same for the rows that the rank of equal local rank on each node sends to this node.
    passed: Vec<Vec<u32>>,
}

/// Returns, for the tokens of all rows to a node, the number of the crossing row that carries
/// each.
pub fn dedup_indices(tokens: impl IntoIterator<Item = u32>) -> Vec<u32> {
    let mut numbers = HashMap::new();
    let number = |token: u32| {
        let next = numbers.len() as u32;
        *numbers.entry(token).or_insert(next)
    };
    tokens.into_iter().map(number).collect()
}

/// Returns the number of rows that cross.
fn crossed(numbers: &[u32]) -> usize {
    numbers.iter().max().map_or(0, |last| *last as usize + 1)
}

impl DedupMap {
    /// Checks and combines the exchanged counts and numbers. `sent` holds the [`dedup_indices`]
    /// of this rank's rows for each node; `passed` holds those that ranks of equal local rank on
    /// other nodes sent for this node. Entries for the own node are ignored. Returns `None` if a
    /// list does not have as many numbers as rows were counted, or was not made by
    /// [`dedup_indices`].
    pub fn new(
        shape: NodeShape,
        rank: usize,
        hop_counts: Arc<HopCounts>,
        sent: Vec<Vec<u32>>,
        passed: Vec<Vec<u32>>,
    ) -> Option<DedupMap> {
        let dedup = DedupMap {
            shape,
            rank,
            hop_counts,
            sent,
            passed,
        };
        let own = shape.split(rank).node;
        // Numbers come from other ranks and index scratch memory below, so check that they are
        // dense and in order of first appearance.
        let dense = |numbers: &[u32]| {
            let mut next = 0;
            numbers.iter().all(|number| {
                next += u32::from(*number == next);
                *number < next
            })
        };
        let fits = |node: usize| {
            let (sent, passed) = (&dedup.sent[node], &dedup.passed[node]);
            let sizes = sent.len() == dedup.rows_for(node) && passed.len() == dedup.rows_from(node);
            sizes && dense(sent) && dense(passed)
        };
        let lists = dedup.sent.len() == shape.nodes && dedup.passed.len() == shape.nodes;
        // Rows for the own node go directly, so their numbers are never used.
        let right = lists && (0..shape.nodes).filter(|node| *node != own).all(fits);
        right.then_some(dedup)
    }

    /// Returns the rows that this rank sends to a node.
    fn rows_for(&self, node: usize) -> usize {
        let each = self.shape.per_node * self.hop_counts.blocks_per_peer();
        let all = &self.hop_counts.sent()[node * each..(node + 1) * each];
        all.iter().sum::<u64>() as usize
    }

    /// Returns the rows that the rank of equal local rank on a node sends to this node.
    fn rows_from(&self, node: usize) -> usize {
        DedupMap::rows_through(&self.hop_counts, self.shape, node)
    }

    /// Returns the rows that the rank of equal local rank on a node sends to this node: the
    /// length of the list of numbers that this rank must receive from there.
    pub fn rows_through(hop_counts: &HopCounts, shape: NodeShape, node: usize) -> usize {
        let places = node * shape.per_node..(node + 1) * shape.per_node;
        let rows = places.flat_map(|place| hop_counts.passing(1, place));
        rows.sum::<u64>() as usize
    }

    /// Returns the arrangement of ranks on nodes.
    pub fn shape(&self) -> NodeShape {
        self.shape
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn hop_counts(&self) -> &HopCounts {
        &self.hop_counts
    }

    /// Returns the map of each chunk where chunks are exchanged separately
    /// ([`HopCounts::in_parts`]): a token crosses once per chunk.
    #[must_use]
    pub fn in_parts(
        &self,
        numbers: Range<usize>,
        rows_of_chunk: &dyn Fn(usize, RowBlock) -> Range<usize>,
    ) -> DedupMap {
        let (own, per_node) = (self.shape.split(self.rank).node, self.shape.per_node);
        let first = |node: usize| node * per_node;
        // The blocks at the places of a node after `hops` hops.
        let blocks = |node: usize, hops: usize| {
            let places = first(node)..first(node + 1);
            places.map(move |place| self.hop_counts.blocks(0, hops, place))
        };
        let nodes = |list: &[Vec<u32>], hops: usize| -> Vec<Vec<u32>> {
            let some = |node: usize| {
                if node == own {
                    Vec::new()
                } else {
                    dedup_indices(parted(
                        &list[node],
                        blocks(node, hops),
                        numbers.clone(),
                        rows_of_chunk,
                    ))
                }
            };
            (0..self.shape.nodes).map(some).collect()
        };
        DedupMap {
            sent: nodes(&self.sent, 0),
            passed: nodes(&self.passed, 1),
            hop_counts: Arc::new(self.hop_counts.in_parts(numbers.clone(), rows_of_chunk)),
            ..*self
        }
    }

    /// Returns the rows inside the messages to or from each peer.
    pub(super) fn rows(
        &self,
        messages: &[(usize, usize)],
        place: fn(usize) -> BufferRef,
        bytes: RowBytes,
    ) -> Vec<Vec<Span>> {
        let mut rows = vec![Vec::new(); self.shape.ranks()];
        for (i, (peer, size)) in messages.iter().enumerate() {
            let bytes = bytes.of(self.crosses(*peer));
            let starts = (0..*size).step_by(bytes.max(1));
            rows[*peer].extend(starts.map(|at| Span::new(place(i), at..at + bytes)));
        }
        rows
    }

    /// Returns the numbers of the rows that a rank on another node gets from here.
    pub(super) fn numbers_for(&self, rank: usize) -> &[u32] {
        let NodeRank { node, place } = self.shape.split(rank);
        let blocks = self.hop_counts.blocks_per_peer();
        let sizes = self.hop_counts.sent()[node * self.shape.per_node * blocks..].chunks(blocks);
        let rows = sizes.map(|own| own.iter().sum::<u64>() as usize);
        part(&self.sent[node], rows, place)
    }

    /// Returns the numbers of the rows that local rank `place` of this node gets from another
    /// node through this rank.
    pub(super) fn numbers_from(&self, node: usize, place: usize) -> &[u32] {
        let first = node * self.shape.per_node;
        let rows = |place: usize| self.hop_counts.passing(1, first + place).sum::<u64>() as usize;
        part(
            &self.passed[node],
            (0..self.shape.per_node).map(rows),
            place,
        )
    }

    /// Returns whether a rank is on another node.
    pub(super) fn crosses(&self, peer: usize) -> bool {
        self.shape.split(peer).node != self.shape.split(self.rank).node
    }

    /// Returns the dispatch of rows of these sizes.
    pub fn of_rows(self: &Arc<DedupMap>, bytes: RowBytes) -> DedupDispatch {
        let node = |rank: usize| self.shape.split(rank).node;
        let size =
            |block: RowBlock| block.units as usize * bytes.of(node(block.from) != node(block.to));
        DedupDispatch {
            dedup: Arc::clone(self),
            schedule: self.hop_counts.there(&size),
            bytes,
        }
    }
}

/// The bytes of a row, which may be cast to a smaller type where it crosses between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBytes {
    /// The bytes of a row that stays on its node.
    pub near: usize,
    /// The bytes of a row that crosses to another node.
    pub far: usize,
}

impl RowBytes {
    /// Returns one size for all rows.
    pub fn same(bytes: usize) -> RowBytes {
        let (near, far) = (bytes, bytes);
        RowBytes { near, far }
    }

    fn of(self, crosses: bool) -> usize {
        if crosses { self.far } else { self.near }
    }
}

/// Returns the entries of the rows in some chunks, in their order. `list` has one entry per row;
/// `blocks` yields the blocks of each rank.
fn parted(
    list: &[u32],
    blocks: impl Iterator<Item = impl Iterator<Item = RowBlock>>,
    numbers: Range<usize>,
    rows_of_chunk: &dyn Fn(usize, RowBlock) -> Range<usize>,
) -> Vec<u32> {
    let (mut some, mut rest) = (Vec::new(), list);
    for blocks in blocks {
        let mut entries = Vec::new();
        for block in blocks {
            let (own, behind) = rest.split_at(block.units as usize);
            entries.push((own, block));
            rest = behind;
        }
        for number in numbers.clone() {
            for (own, block) in &entries {
                some.extend_from_slice(&own[rows_of_chunk(number, *block)]);
            }
        }
    }
    some
}

/// Returns the entries of one place, given the number of entries of every place.
fn part(list: &[u32], mut sizes: impl Iterator<Item = usize>, place: usize) -> &[u32] {
    let first: usize = sizes.by_ref().take(place).sum();
    &list[first..first + sizes.next().unwrap_or(0)]
}

/// A deduplicated dispatch of rows of some size.
#[derive(Clone, Debug)]
pub struct DedupDispatch {
    dedup: Arc<DedupMap>,
    schedule: HopSchedule,
    bytes: RowBytes,
}

impl Schedule for DedupDispatch {
    fn code(&self) -> u64 {
        // The code of the schedule (between nodes first), with an order count that no
        // [`HopOrder`](super::HopOrder) uses.
        self.schedule.code() | 7 << 3
    }

    fn plan(
        &self,
        own: GroupRank,
        sends: &[(usize, usize)],
        receives: &[(usize, usize)],
    ) -> Result<CollectivePlan, ScheduleError> {
        self.schedule.check(own, sends, receives)?;
        let planning = DispatchPlanning {
            dedup: &self.dedup,
            bytes: self.bytes.far,
            from: self.dedup.rows(sends, BufferRef::Input, self.bytes),
            to: self.dedup.rows(receives, BufferRef::Output, self.bytes),
        };
        Ok(planning.plan())
    }
}

struct DispatchPlanning<'a> {
    dedup: &'a DedupMap,
    /// The bytes of a row that crosses.
    bytes: usize,
    /// The rows to each rank.
    from: Vec<Vec<Span>>,
    /// The rows from each rank.
    to: Vec<Vec<Span>>,
}

impl DispatchPlanning<'_> {
    fn plan(&self) -> CollectivePlan {
        let shape = self.dedup.shape;
        let NodeRank { node, place } = shape.split(self.dedup.rank);
        let (mut cross, mut spread) = (MessageLists::default(), MessageLists::default());
        let mut first = 0;
        // The offset in scratch of the rows that arrive from each node.
        let arrived: Vec<usize> = (0..shape.nodes)
            .map(|from| {
                let begin = first;
                if from != node {
                    first += crossed(&self.dedup.passed[from]) * self.bytes;
                }
                begin
            })
            .collect();
        for other in others(node, shape.nodes) {
            let peer = shape.rank(other, place);
            cross.send(peer, self.dedup_indices(other));
            let rows = crossed(&self.dedup.passed[other]);
            cross.receive(peer, (0..rows).map(|row| self.crossed(arrived[other], row)));
        }
        for near in others(place, shape.per_node) {
            let peer = shape.rank(node, near);
            cross.send(peer, self.from[peer].iter().copied());
            cross.receive(peer, self.to[peer].iter().copied());
            for other in others(node, shape.nodes) {
                spread.send(peer, self.passing(other, near, arrived[other]));
                spread.receive(peer, self.to[shape.rank(other, near)].iter().copied());
            }
        }
        let own = self.dedup.rank;
        cross.copy(self.from[own].iter().copied(), &self.to[own]);
        for other in others(node, shape.nodes) {
            let to = &self.to[shape.rank(other, place)];
            spread.copy(self.passing(other, place, arrived[other]), to);
        }
        CollectivePlan {
            scratch: first,
            steps: vec![
                cross.step(0, "inter-node exchange of each token's first row"),
                spread.step(1, "intra-node exchange"),
            ],
        }
    }

    fn crossed(&self, first: usize, row: usize) -> Span {
        let at = first + row * self.bytes;
        Span::new(BufferRef::Scratch, at..at + self.bytes)
    }

    /// Returns the first row of each token for a node.
    fn dedup_indices(&self, node: usize) -> impl Iterator<Item = Span> {
        let ranks =
            (0..self.dedup.shape.per_node).map(move |place| self.dedup.shape.rank(node, place));
        let rows = ranks.flat_map(|rank| &self.from[rank]);
        let mut next = 0;
        let numbered = rows.zip(&self.dedup.sent[node]);
        numbered.filter_map(move |(row, number)| {
            let first = *number == next;
            next += u32::from(first);
            first.then_some(*row)
        })
    }

    /// Returns the scratch rows that arrived from a node and go on to local rank `place` of this
    /// node.
    fn passing(&self, node: usize, place: usize, first: usize) -> impl Iterator<Item = Span> {
        let numbers = self.dedup.numbers_from(node, place);
        numbers
            .iter()
            .map(move |row| self.crossed(first, *row as usize))
    }
}

#[derive(Default)]
struct MessageLists {
    sends: Vec<Message>,
    receives: Vec<Message>,
    copies: Vec<Copy>,
}

impl MessageLists {
    fn send(&mut self, peer: usize, spans: impl Iterator<Item = Span>) {
        self.sends.extend(spans.map(|span| Message { peer, span }));
    }

    fn receive(&mut self, peer: usize, spans: impl Iterator<Item = Span>) {
        self.receives
            .extend(spans.map(|span| Message { peer, span }));
    }

    fn copy(&mut self, from: impl Iterator<Item = Span>, to: &[Span]) {
        self.copies.extend(from.zip(to).map(|(from, to)| Copy {
            from,
            to: to.buffer,
            offset: to.offset,
        }));
    }

    fn step(self, phase: u32, name: &'static str) -> ScheduleStep {
        ScheduleStep::Exchange {
            phase,
            name,
            sends: self.sends,
            receives: self.receives,
            copies: self.copies,
        }
    }
}
