//! The deduplicating exchange: rows of one token are equal, and cross to a node dedup_dispatch.
//!
//! A rank sends the first row of each token for a node to the rank of its own place there,
//! which sends it on to every rank of that node that gets a row of the token. DedupDispatch for the
//! own node go straight. What arrives is what arrives without.

use super::{
    Block, Copy, HopCounts, HopSchedule, Message, Place, Plan, Schedule, Span, Step, others,
};
use crate::NodeShape;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Which rows cross, for the rows of one rank and for those that others send through it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DedupMap {
    shape: NodeShape,
    rank: usize,
    /// How many rows there are, told between nodes first.
    hop_counts: Arc<HopCounts>,
    /// By node, of each row for it (by rank, then in the order of its pieces), the number of
    /// the row that crosses for it. Those that cross are numbered as they first come.
    sent: Vec<Vec<u32>>,
    /// The same of the rows that the rank of this place in each node has for this node.
    passed: Vec<Vec<u32>>,
}

/// Numbers of the rows that cross to a node, from the tokens of all rows for it.
pub fn dedup_indices(tokens: impl IntoIterator<Item = u32>) -> Vec<u32> {
    let mut numbers = HashMap::new();
    let number = |token: u32| {
        let next = numbers.len() as u32;
        *numbers.entry(token).or_insert(next)
    };
    tokens.into_iter().map(number).collect()
}

/// How many rows cross.
fn crossed(numbers: &[u32]) -> usize {
    numbers.iter().max().map_or(0, |last| *last as usize + 1)
}

impl DedupMap {
    /// From what was told; `sent` has [`dedup_indices`] of this rank's rows for each node, `passed`
    /// what the ranks of this place in other nodes have told of theirs for this one. Numbers
    /// for the own node mean nothing. `None` if there are not as many as rows were told, or
    /// none that [`dedup_indices`] makes.
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
        let (own, _) = shape.split(rank);
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
        let right = lists && (0..shape.nodes).filter(|node| *node != own).all(fits);
        right.then_some(dedup)
    }

    /// DedupDispatch of this rank for a node.
    fn rows_for(&self, node: usize) -> usize {
        let each = self.shape.per_node * self.hop_counts.pieces();
        let all = &self.hop_counts.sent()[node * each..(node + 1) * each];
        all.iter().sum::<u64>() as usize
    }

    /// DedupDispatch of the rank of this place in a node for this node.
    fn rows_from(&self, node: usize) -> usize {
        DedupMap::rows_through(&self.hop_counts, self.shape, node)
    }

    /// DedupDispatch that the rank of this place in a node has for this node, of which it tells the
    /// numbers.
    pub fn rows_through(hop_counts: &HopCounts, shape: NodeShape, node: usize) -> usize {
        let places = node * shape.per_node..(node + 1) * shape.per_node;
        let rows = places.flat_map(|place| hop_counts.passing(1, place));
        rows.sum::<u64>() as usize
    }

    /// The nodes.
    pub fn shape(&self) -> NodeShape {
        self.shape
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn hop_counts(&self) -> &HopCounts {
        &self.hop_counts
    }

    /// Which rows cross where each travels in a part of its own ([`HopCounts::in_parts`]): a
    /// token crosses dedup_dispatch in each of them.
    #[must_use]
    pub fn in_parts(
        &self,
        numbers: Range<usize>,
        cut: &dyn Fn(usize, Block) -> Range<usize>,
    ) -> DedupMap {
        let (own, per_node) = (self.shape.split(self.rank).0, self.shape.per_node);
        let first = |node: usize| node * per_node;
        // What is at the places of a node after so many hops.
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
                        cut,
                    ))
                }
            };
            (0..self.shape.nodes).map(some).collect()
        };
        DedupMap {
            sent: nodes(&self.sent, 0),
            passed: nodes(&self.passed, 1),
            hop_counts: Arc::new(self.hop_counts.in_parts(numbers.clone(), cut)),
            ..*self
        }
    }

    /// DedupDispatch that are in messages of the peers, by peer.
    pub(super) fn rows(
        &self,
        messages: &[(usize, usize)],
        place: fn(usize) -> Place,
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

    /// Numbers of the rows that a rank of another node gets from here.
    pub(super) fn numbers_for(&self, rank: usize) -> &[u32] {
        let (node, place) = self.shape.split(rank);
        let pieces = self.hop_counts.pieces();
        let sizes = self.hop_counts.sent()[node * self.shape.per_node * pieces..].chunks(pieces);
        let rows = sizes.map(|own| own.iter().sum::<u64>() as usize);
        part(&self.sent[node], rows, place)
    }

    /// Numbers of the rows that a place of this node gets from the rank of the own place in
    /// another.
    pub(super) fn numbers_from(&self, node: usize, place: usize) -> &[u32] {
        let first = node * self.shape.per_node;
        let rows = |place: usize| self.hop_counts.passing(1, first + place).sum::<u64>() as usize;
        part(
            &self.passed[node],
            (0..self.shape.per_node).map(rows),
            place,
        )
    }

    /// Whether a rank is on another node.
    pub(super) fn crosses(&self, peer: usize) -> bool {
        self.shape.split(peer).0 != self.shape.split(self.rank).0
    }

    /// The exchange of rows of so many bytes.
    pub fn of_rows(self: &Arc<DedupMap>, bytes: RowBytes) -> DedupDispatch {
        let node = |rank: usize| self.shape.split(rank).0;
        let size =
            |block: Block| block.units as usize * bytes.of(node(block.from) != node(block.to));
        DedupDispatch {
            dedup: Arc::clone(self),
            schedule: self.hop_counts.there(&size),
            bytes,
        }
    }
}

/// Bytes of a row, which may be packed for its way to another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBytes {
    /// Of one that stays on its node.
    pub near: usize,
    /// Of one that goes to another.
    pub far: usize,
}

impl RowBytes {
    /// Of rows that are the same everywhere.
    pub fn same(bytes: usize) -> RowBytes {
        let (near, far) = (bytes, bytes);
        RowBytes { near, far }
    }

    fn of(self, crosses: bool) -> usize {
        if crosses { self.far } else { self.near }
    }
}

/// What a list has of each row, of the rows of these parts alone, in their order. `blocks` has
/// for each rank its pieces.
fn parted(
    list: &[u32],
    blocks: impl Iterator<Item = impl Iterator<Item = Block>>,
    numbers: Range<usize>,
    cut: &dyn Fn(usize, Block) -> Range<usize>,
) -> Vec<u32> {
    let (mut some, mut rest) = (Vec::new(), list);
    for blocks in blocks {
        let mut pieces = Vec::new();
        for block in blocks {
            let (piece, behind) = rest.split_at(block.units as usize);
            pieces.push((piece, block));
            rest = behind;
        }
        for number in numbers.clone() {
            for (piece, block) in &pieces {
                some.extend_from_slice(&piece[cut(number, *block)]);
            }
        }
    }
    some
}

/// The part of a place, of parts of these sizes.
fn part(list: &[u32], mut sizes: impl Iterator<Item = usize>, place: usize) -> &[u32] {
    let first: usize = sizes.by_ref().take(place).sum();
    &list[first..first + sizes.next().unwrap_or(0)]
}

/// A deduplicating exchange of rows of some size.
#[derive(Clone, Debug)]
pub struct DedupDispatch {
    dedup: Arc<DedupMap>,
    schedule: HopSchedule,
    bytes: RowBytes,
}

impl Schedule for DedupDispatch {
    fn code(&self) -> u64 {
        // As between nodes first, with a number of ways that nothing else has.
        self.schedule.code() | 7 << 3
    }

    fn plan(
        &self,
        rank: (usize, usize),
        sends: &[(usize, usize)],
        receives: &[(usize, usize)],
    ) -> Result<Plan, String> {
        self.schedule.check(rank, sends, receives)?;
        let planning = Planning {
            dedup: &self.dedup,
            bytes: self.bytes.far,
            from: self.dedup.rows(sends, Place::Input, self.bytes),
            to: self.dedup.rows(receives, Place::Output, self.bytes),
        };
        Ok(planning.plan())
    }
}

struct Planning<'a> {
    dedup: &'a DedupMap,
    /// Of a row that crosses.
    bytes: usize,
    /// DedupDispatch by the rank that they go to.
    from: Vec<Vec<Span>>,
    /// DedupDispatch by the rank that they come from.
    to: Vec<Vec<Span>>,
}

impl Planning<'_> {
    fn plan(&self) -> Plan {
        let shape = self.dedup.shape;
        let (node, place) = shape.split(self.dedup.rank);
        let (mut cross, mut spread) = (Parts::default(), Parts::default());
        let mut first = 0;
        // In scratch lie the rows that have crossed, by node.
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
        Plan {
            scratch: first,
            steps: vec![
                cross.step(0, "inter-node exchange of each token's first row"),
                spread.step(1, "intra-node exchange"),
            ],
        }
    }

    fn crossed(&self, first: usize, row: usize) -> Span {
        let at = first + row * self.bytes;
        Span::new(Place::Scratch, at..at + self.bytes)
    }

    /// The first row of each token for a node.
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

    /// Where the rows are that came from a node and go to a place of this one.
    fn passing(&self, node: usize, place: usize, first: usize) -> impl Iterator<Item = Span> {
        let numbers = self.dedup.numbers_from(node, place);
        numbers
            .iter()
            .map(move |row| self.crossed(first, *row as usize))
    }
}

#[derive(Default)]
struct Parts {
    sends: Vec<Message>,
    receives: Vec<Message>,
    copies: Vec<Copy>,
}

impl Parts {
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
            to: to.place,
            offset: to.offset,
        }));
    }

    fn step(self, phase: u32, name: &'static str) -> Step {
        Step::Exchange {
            phase,
            name,
            sends: self.sends,
            receives: self.receives,
            copies: self.copies,
        }
    }
}
