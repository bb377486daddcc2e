//! Deduplicated combine: the ranks of a node sum their expert outputs for each remote token, and
//! one row per token and node crosses the network.
//!
//! The sum arrives in the place of the token's first row for that node. The token's other rows
//! for that node become zeros, so the receiver can still add up all rows.

use super::dedup_dispatch::{DedupMap, RowBytes, dedup_indices};
use super::{
    BufferRef, CollectivePlan, Copy, GroupRank, HopSchedule, Message, Schedule, ScheduleStep, Span,
    offsets, others,
};
use super::{CommElement, Reduction, ScheduleError};
use crate::NodeRank;
use std::sync::Arc;

impl DedupMap {
    /// Returns the combine of rows; `answers(from, to)` says whether rank
    /// `from` has rows for rank `to`. Sums are taken in rank order, then in block order. They are
    /// taken in f32 where an element is smaller, and rounded once.
    pub fn summed(
        self: &Arc<DedupMap>,
        AddendRow { element, bytes }: AddendRow,
        answers: &dyn Fn(usize, usize) -> bool,
    ) -> DedupCombine {
        let size = |block: super::RowBlock| {
            if answers(block.from, block.to) {
                block.units as usize * bytes
            } else {
                0
            }
        };
        DedupCombine {
            dedup: Arc::clone(self),
            schedule: self.hop_counts().back(&size),
            element,
            bytes,
        }
    }
}

/// A row that is summed with others.
#[derive(Clone, Copy, Debug)]
pub struct AddendRow {
    /// The type of its elements.
    pub element: CommElement,
    /// Its bytes.
    pub bytes: usize,
}

/// An exchange that sums rows inside a node before they cross to another.
#[derive(Clone, Debug)]
pub struct DedupCombine {
    dedup: Arc<DedupMap>,
    schedule: HopSchedule,
    element: CommElement,
    bytes: usize,
}

impl Schedule for DedupCombine {
    fn code(&self) -> u64 {
        // The code of the reversed schedule (inside nodes first), with an order count that no
        // [`HopOrder`](super::HopOrder) uses.
        self.schedule.code() | 6 << 3
    }

    fn plan(
        &self,
        own: GroupRank,
        sends: &[(usize, usize)],
        receives: &[(usize, usize)],
    ) -> Result<CollectivePlan, ScheduleError> {
        self.schedule.check(own, sends, receives)?;
        let bytes = RowBytes::same(self.bytes);
        let from = self.dedup.rows(sends, BufferRef::Input, bytes);
        let to = self.dedup.rows(receives, BufferRef::Output, bytes);
        Ok(CombinePlanning::new(self, from, to).plan())
    }
}

/// The first half of a [`DedupCombine`]: exchanges the rows of this node, and sums what this node
/// has for the ranks of equal local rank on other nodes, without sending the sums. The sums are
/// outputs: one for each such rank, of [`IntraNodeCombine::tokens`] rows.
#[derive(Clone, Debug)]
pub struct IntraNodeCombine(DedupCombine);

impl DedupCombine {
    /// Returns the half inside nodes, for a caller that casts the sums before they cross.
    pub fn inside_nodes(self) -> IntraNodeCombine {
        IntraNodeCombine(self)
    }
}

impl IntraNodeCombine {
    /// Returns the number of sums that this rank has for the rank of its local rank on a node.
    pub fn tokens(&self, node: usize) -> usize {
        CombinePlanning::new(&self.0, Vec::new(), Vec::new()).nodes[node]
            .returned
            .len()
    }

    /// Returns, for each row of this rank that a node answers (by rank of that node, then in row
    /// order), whether it is the first of its token. A sum arrives for each first row.
    pub fn firsts(&self, node: usize) -> Vec<bool> {
        let dedup = &self.0.dedup;
        let ranks = (0..dedup.shape().per_node).map(|place| dedup.shape().rank(node, place));
        let answered = ranks.filter(|rank| self.0.schedule.received(*rank).iter().any(|n| *n > 0));
        let numbers: Vec<u32> = answered
            .flat_map(|rank| dedup.numbers_for(rank))
            .copied()
            .collect();
        let mut next = 0;
        let first = |number: u32| {
            let first = number == next;
            next += u32::from(first);
            first
        };
        dedup_indices(numbers).into_iter().map(first).collect()
    }
}

impl Schedule for IntraNodeCombine {
    fn code(&self) -> u64 {
        // The code of the reversed schedule, with another order count that no
        // [`HopOrder`](super::HopOrder) uses.
        self.0.schedule.code() | 5 << 3
    }

    fn plan(
        &self,
        own: GroupRank,
        sends: &[(usize, usize)],
        receives: &[(usize, usize)],
    ) -> Result<CollectivePlan, ScheduleError> {
        let DedupCombine { dedup, bytes, .. } = &self.0;
        let bytes = RowBytes::same(*bytes);
        let from = dedup.rows(sends, BufferRef::Input, bytes);
        let to = dedup.rows(receives, BufferRef::Output, bytes);
        let near = |peer: usize| !dedup.crosses(peer);
        let schedule = &self.0.schedule;
        schedule.check_from(own, sends, receives, &near)?;
        let planning = CombinePlanning::new(&self.0, from, to);
        let shape = dedup.shape();
        for peer in (0..shape.ranks()).filter(|peer| dedup.crosses(*peer)) {
            let NodeRank { node, place } = shape.split(peer);
            let sums = if place == shape.split(own.rank).place {
                planning.nodes[node].returned.len()
            } else {
                0
            };
            let outputs = planning.to[peer].len();
            if outputs != sums {
                return Err(ScheduleError::Sums {
                    peer,
                    outputs,
                    sums,
                });
            }
        }
        Ok(planning.plan_inside_nodes())
    }
}

/// The rows of one rank on another node that this rank sums for it.
struct NodeSums {
    /// The scratch rows by sending rank of this node. The rows of a token are adjacent, as a
    /// reduction needs them.
    rows: Vec<Vec<Span>>,
    /// All rows of each token with several, and the place of their sum.
    sums: Vec<(Span, Span)>,
    /// The rows that return: one for each token.
    returned: Vec<Span>,
}

struct CombinePlanning<'a> {
    sums: &'a DedupCombine,
    /// The rows to each rank.
    from: Vec<Vec<Span>>,
    /// The rows from each rank.
    to: Vec<Vec<Span>>,
    /// By node; empty for this node.
    nodes: Vec<NodeSums>,
    /// A row of zeros in scratch.
    zeros: Span,
    scratch: usize,
}

impl CombinePlanning<'_> {
    fn new(sums: &DedupCombine, from: Vec<Vec<Span>>, to: Vec<Vec<Span>>) -> CombinePlanning<'_> {
        let zeros = Span::new(BufferRef::Scratch, 0..sums.bytes);
        let mut planning = CombinePlanning {
            sums,
            from,
            to,
            nodes: Vec::new(),
            zeros,
            // The row of zeros lies first, padded because `Write` stores whole numbers.
            scratch: sums.bytes.next_multiple_of(16),
        };
        let nodes = sums.dedup.shape().nodes;
        planning.nodes = (0..nodes).map(|node| planning.node_sums(node)).collect();
        planning
    }

    /// Reserves scratch for `rows` rows and returns its offset.
    fn allocate(&mut self, rows: usize) -> usize {
        let first = self.scratch;
        self.scratch += rows * self.sums.bytes;
        first
    }

    fn row(&self, first: usize, row: usize) -> Span {
        let at = first + row * self.sums.bytes;
        Span::new(BufferRef::Scratch, at..at + self.sums.bytes)
    }

    fn node_sums(&mut self, node: usize) -> NodeSums {
        let dedup = &self.sums.dedup;
        let own = dedup.shape().split(dedup.rank()).node;
        let per_node = if node == own {
            0
        } else {
            dedup.shape().per_node
        };
        // The row numbers of each rank of this node, if that rank answers.
        let answers = |place: usize| {
            let at = node * dedup.shape().per_node + place;
            self.sums
                .schedule
                .of(0, 1, at)
                .iter()
                .any(|bytes| *bytes > 0)
        };
        // Where experts are in shards, only the shards of the receiver's index answer. Their sums
        // are complete already.
        let kept = |place: usize| {
            if answers(place) {
                dedup.numbers_from(node, place)
            } else {
                &[]
            }
        };
        let lists: Vec<&[u32]> = (0..per_node).map(kept).collect();
        let numbers = dedup_indices(lists.concat());
        let mut counts = vec![0; numbers.iter().max().map_or(0, |last| *last as usize + 1)];
        for number in &numbers {
            counts[*number as usize] += 1;
        }
        let sizes: Vec<usize> = lists.iter().map(|list| list.len()).collect();
        let starts = offsets(&counts);
        let first = self.allocate(numbers.len());
        let totals = self.allocate(counts.len());
        let mut next = starts.clone();
        let placed: Vec<Span> = numbers
            .iter()
            .map(|number| {
                let at = &mut next[*number as usize];
                *at += 1;
                self.row(first, *at - 1)
            })
            .collect();
        let all = |token: usize| Span {
            bytes: counts[token] * self.sums.bytes,
            ..self.row(first, starts[token])
        };
        // A token with a single row needs no sum: its row returns directly from where it arrived.
        let several = |token: &usize| counts[*token] > 1;
        let tokens = 0..counts.len();
        let edges = offsets(&sizes);
        NodeSums {
            rows: edges
                .windows(2)
                .map(|edge| placed[edge[0]..edge[1]].to_vec())
                .collect(),
            sums: (tokens.clone().filter(several))
                .map(|token| (all(token), self.row(totals, token)))
                .collect(),
            returned: tokens
                .map(|token| {
                    if several(&token) {
                        self.row(totals, token)
                    } else {
                        all(token)
                    }
                })
                .collect(),
        }
    }

    fn plan(&self) -> CollectivePlan {
        // `Write` stores 64-bit numbers, so the row of zeros is rounded up to whole numbers.
        let zeros = vec![0; self.sums.bytes.div_ceil(8)];
        let mut steps = vec![ScheduleStep::Write(self.zeros.offset, zeros), self.inside()];
        steps.extend(self.reduce());
        let (between, zeros) = self.between();
        steps.extend([between, ScheduleStep::Repack(zeros)]);
        CollectivePlan {
            scratch: self.scratch,
            steps,
        }
    }

    /// Returns the plan without the crossing: sums are outputs.
    fn plan_inside_nodes(&self) -> CollectivePlan {
        let dedup = &self.sums.dedup;
        let NodeRank { node, place } = dedup.shape().split(dedup.rank());
        let mut steps = vec![self.inside()];
        steps.extend(self.reduce());
        let others = others(node, dedup.shape().nodes);
        let sums = others.flat_map(|other| {
            let to = &self.to[dedup.shape().rank(other, place)];
            copied(&self.nodes[other].returned, to)
        });
        steps.push(ScheduleStep::Repack(sums.collect()));
        CollectivePlan {
            scratch: self.scratch,
            steps,
        }
    }

    /// Returns the sums of tokens with several rows.
    fn reduce(&self) -> impl Iterator<Item = ScheduleStep> {
        let nodes = self.nodes.iter().flat_map(|node| &node.sums);
        nodes.map(|(rows, sum)| ScheduleStep::Reduce {
            element: self.sums.element,
            reduction: Reduction::Sum,
            rows: rows.offset..rows.offset + rows.bytes,
            row_bytes: self.sums.bytes,
            to: sum.buffer,
            offset: sum.offset,
        })
    }

    /// Sends every row to the rank of this node that has the receiver's local rank.
    fn inside(&self) -> ScheduleStep {
        let dedup = &self.sums.dedup;
        let shape = dedup.shape();
        let NodeRank { node, place } = shape.split(dedup.rank());
        // One round carries both kinds of rows, those for ranks of this node and those that are
        // summed for other nodes: a second round would only add its latency.
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for near in others(place, shape.per_node) {
            let peer = shape.rank(node, near);
            let message = |span: &Span| Message { peer, span: *span };
            sends.extend(self.from[peer].iter().map(message));
            receives.extend(self.to[peer].iter().map(message));
            for other in others(node, shape.nodes) {
                sends.extend(self.from[shape.rank(other, near)].iter().map(message));
                receives.extend(self.nodes[other].rows[near].iter().map(message));
            }
        }
        let own = dedup.rank();
        let mut copies = copied(&self.from[own], &self.to[own]);
        for other in others(node, shape.nodes) {
            let from = &self.from[shape.rank(other, place)];
            copies.extend(copied(from, &self.nodes[other].rows[place]));
        }
        ScheduleStep::Exchange {
            phase: 0,
            name: "intra-node exchange",
            sends,
            receives,
            copies,
        }
    }

    /// Returns the exchange between nodes, and the rows that become zeros after it.
    fn between(&self) -> (ScheduleStep, Vec<Copy>) {
        let dedup = &self.sums.dedup;
        let shape = dedup.shape();
        let NodeRank { node, place } = shape.split(dedup.rank());
        let (mut sends, mut receives, mut zeros) = (Vec::new(), Vec::new(), Vec::new());
        for other in others(node, shape.nodes) {
            let peer = shape.rank(other, place);
            let message = |span: &Span| Message { peer, span: *span };
            sends.extend(self.nodes[other].returned.iter().map(message));
            let (first, others) = self.firsts(other);
            receives.extend(first.iter().map(message));
            zeros.extend(others.iter().map(|row| Copy {
                from: self.zeros,
                to: row.buffer,
                offset: row.offset,
            }));
        }
        let step = ScheduleStep::Exchange {
            phase: 1,
            name: "inter-node exchange of sums",
            sends,
            receives,
            copies: Vec::new(),
        };
        (step, zeros)
    }

    /// Returns the first row of each token that a node answers, and all other rows.
    fn firsts(&self, node: usize) -> (Vec<Span>, Vec<Span>) {
        let dedup = &self.sums.dedup;
        let ranks = (0..dedup.shape().per_node).map(|place| dedup.shape().rank(node, place));
        let answered = ranks.filter(|rank| !self.to[*rank].is_empty());
        let (mut rows, mut numbers) = (Vec::new(), Vec::new());
        for rank in answered {
            rows.extend_from_slice(&self.to[rank]);
            numbers.extend_from_slice(dedup.numbers_for(rank));
        }
        let mut next = 0;
        let (mut first, mut others) = (Vec::new(), Vec::new());
        for (row, number) in rows.into_iter().zip(dedup_indices(numbers)) {
            let list = if number == next {
                &mut first
            } else {
                &mut others
            };
            next += u32::from(number == next);
            list.push(row);
        }
        (first, others)
    }
}

fn copied(from: &[Span], to: &[Span]) -> Vec<Copy> {
    let pairs = from.iter().zip(to);
    pairs
        .map(|(from, to)| Copy {
            from: *from,
            to: to.buffer,
            offset: to.offset,
        })
        .collect()
}
