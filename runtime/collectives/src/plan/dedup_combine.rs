//! The way back of the deduplicating exchange: what a node has for a token is summed
//! there, and one row returns. It comes where the token's first row of that node is; the
//! token's other rows of that node become zeros, so that all rows still add up.

use super::dedup_dispatch::{DedupMap, RowBytes, dedup_indices};
use super::{Copy, HopSchedule, Message, Place, Plan, Schedule, Span, Step, offsets, others};
use crate::{Element, Reduction};
use std::sync::Arc;

impl DedupMap {
    /// The exchange of answers in rows of so many bytes; `answers` says from which rank to
    /// which there are any. DedupCombine are in the order of ranks, then of their pieces, in f32
    /// where an element is smaller, each rounded dedup_dispatch.
    pub fn summed(
        self: &Arc<DedupMap>,
        (element, bytes): (Element, usize),
        answers: &dyn Fn(usize, usize) -> bool,
    ) -> DedupCombine {
        let size = |block: super::Block| {
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

/// Answers that are summed on their way.
#[derive(Clone, Debug)]
pub struct DedupCombine {
    dedup: Arc<DedupMap>,
    schedule: HopSchedule,
    element: Element,
    bytes: usize,
}

impl Schedule for DedupCombine {
    fn code(&self) -> u64 {
        // As inside nodes first, with a number of ways that nothing else has.
        self.schedule.code() | 6 << 3
    }

    fn plan(
        &self,
        rank: (usize, usize),
        sends: &[(usize, usize)],
        receives: &[(usize, usize)],
    ) -> Result<Plan, String> {
        self.schedule.check(rank, sends, receives)?;
        let bytes = RowBytes::same(self.bytes);
        let from = self.dedup.rows(sends, Place::Input, bytes);
        let to = self.dedup.rows(receives, Place::Output, bytes);
        Ok(Planning::new(self, from, to).plan())
    }
}

/// The first half of [`DedupCombine`]: rows of the own node, and what this rank's node has for the
/// ranks of its place in others, summed and not sent. Their sums are outputs: for each such
/// rank one of as many rows as [`IntraNodeCombine::tokens`].
#[derive(Clone, Debug)]
pub struct IntraNodeCombine(DedupCombine);

impl DedupCombine {
    /// DedupCombine that something else is done with before they cross to other nodes.
    pub fn inside_nodes(self) -> IntraNodeCombine {
        IntraNodeCombine(self)
    }
}

impl IntraNodeCombine {
    /// Of so many tokens this rank has a sum for the rank of its place in a node.
    pub fn tokens(&self, node: usize) -> usize {
        Planning::new(&self.0, Vec::new(), Vec::new()).heaps[node]
            .returned
            .len()
    }

    /// Of the rows of this rank that a node answers, by rank of that node, then in their
    /// order: which are the first of their token. A sum comes for each of these.
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
        // As inside nodes first, with a number of ways that nothing else has.
        self.0.schedule.code() | 5 << 3
    }

    fn plan(
        &self,
        rank: (usize, usize),
        sends: &[(usize, usize)],
        receives: &[(usize, usize)],
    ) -> Result<Plan, String> {
        let DedupCombine { dedup, bytes, .. } = &self.0;
        let bytes = RowBytes::same(*bytes);
        let from = dedup.rows(sends, Place::Input, bytes);
        let to = dedup.rows(receives, Place::Output, bytes);
        let near = |peer: usize| !dedup.crosses(peer);
        let schedule = &self.0.schedule;
        schedule.check_from(rank, sends, receives, &near)?;
        let planning = Planning::new(&self.0, from, to);
        let shape = dedup.shape();
        for peer in (0..shape.ranks()).filter(|peer| dedup.crosses(*peer)) {
            let (node, place) = shape.split(peer);
            let sums = if place == shape.split(rank.0).1 {
                planning.heaps[node].returned.len()
            } else {
                0
            };
            let room = planning.to[peer].len();
            if room != sums {
                return Err(format!(
                    "room for {room} sums for rank {peer}, there are {sums}"
                ));
            }
        }
        Ok(planning.inside_alone())
    }
}

/// The rows of one rank in another node that this node sums for it.
struct Heap {
    /// By rank of this node, where its rows go in scratch: those of a token in a row.
    rows: Vec<Vec<Span>>,
    /// All rows of each token that has several, and where their sum goes.
    sums: Vec<(Span, Span)>,
    /// What returns, a row for each token.
    returned: Vec<Span>,
}

struct Planning<'a> {
    sums: &'a DedupCombine,
    /// Rows by the rank that they go to.
    from: Vec<Vec<Span>>,
    /// Rows by the rank that they come from.
    to: Vec<Vec<Span>>,
    /// By node; of the own one nothing.
    heaps: Vec<Heap>,
    /// A row of zeros in scratch.
    zeros: Span,
    scratch: usize,
}

impl Planning<'_> {
    fn new(sums: &DedupCombine, from: Vec<Vec<Span>>, to: Vec<Vec<Span>>) -> Planning<'_> {
        let zeros = Span::new(Place::Scratch, 0..sums.bytes);
        let mut planning = Planning {
            sums,
            from,
            to,
            heaps: Vec::new(),
            zeros,
            scratch: sums.bytes.next_multiple_of(16),
        };
        let nodes = sums.dedup.shape().nodes;
        planning.heaps = (0..nodes).map(|node| planning.heap(node)).collect();
        planning
    }

    /// A row of scratch that nobody else has.
    fn room(&mut self, rows: usize) -> usize {
        let first = self.scratch;
        self.scratch += rows * self.sums.bytes;
        first
    }

    fn row(&self, first: usize, row: usize) -> Span {
        let at = first + row * self.sums.bytes;
        Span::new(Place::Scratch, at..at + self.sums.bytes)
    }

    fn heap(&mut self, node: usize) -> Heap {
        let dedup = &self.sums.dedup;
        let own = dedup.shape().split(dedup.rank()).0;
        let per_node = if node == own {
            0
        } else {
            dedup.shape().per_node
        };
        // Of each rank of this node its rows' numbers, where it answers.
        let answers = |place: usize| {
            let at = node * dedup.shape().per_node + place;
            self.sums
                .schedule
                .of(0, 1, at)
                .iter()
                .any(|bytes| *bytes > 0)
        };
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
        let first = self.room(numbers.len());
        let totals = self.room(counts.len());
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
        let several = |token: &usize| counts[*token] > 1;
        let tokens = 0..counts.len();
        let edges = offsets(&sizes);
        Heap {
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

    fn plan(&self) -> Plan {
        let zeros = vec![0; self.sums.bytes.div_ceil(8)];
        let mut steps = vec![Step::Write(self.zeros.offset, zeros), self.inside()];
        steps.extend(self.reduce());
        let (between, zeros) = self.between();
        steps.extend([between, Step::Repack(zeros)]);
        Plan {
            scratch: self.scratch,
            steps,
        }
    }

    /// Without what crosses: sums are outputs.
    fn inside_alone(&self) -> Plan {
        let dedup = &self.sums.dedup;
        let (node, place) = dedup.shape().split(dedup.rank());
        let mut steps = vec![self.inside()];
        steps.extend(self.reduce());
        let others = others(node, dedup.shape().nodes);
        let sums = others.flat_map(|other| {
            let to = &self.to[dedup.shape().rank(other, place)];
            copied(&self.heaps[other].returned, to)
        });
        steps.push(Step::Repack(sums.collect()));
        Plan {
            scratch: self.scratch,
            steps,
        }
    }

    /// DedupCombine of the tokens that have several rows.
    fn reduce(&self) -> impl Iterator<Item = Step> {
        let heaps = self.heaps.iter().flat_map(|heap| &heap.sums);
        heaps.map(|(rows, sum)| Step::Reduce {
            element: self.sums.element,
            reduction: Reduction::Sum,
            rows: rows.offset..rows.offset + rows.bytes,
            row_bytes: self.sums.bytes,
            to: sum.place,
            offset: sum.offset,
        })
    }

    /// Every answer to the rank of its receiver's place in this node, or to itself.
    fn inside(&self) -> Step {
        let dedup = &self.sums.dedup;
        let shape = dedup.shape();
        let (node, place) = shape.split(dedup.rank());
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for near in others(place, shape.per_node) {
            let peer = shape.rank(node, near);
            let message = |span: &Span| Message { peer, span: *span };
            sends.extend(self.from[peer].iter().map(message));
            receives.extend(self.to[peer].iter().map(message));
            for other in others(node, shape.nodes) {
                sends.extend(self.from[shape.rank(other, near)].iter().map(message));
                receives.extend(self.heaps[other].rows[near].iter().map(message));
            }
        }
        let own = dedup.rank();
        let mut copies = copied(&self.from[own], &self.to[own]);
        for other in others(node, shape.nodes) {
            let from = &self.from[shape.rank(other, place)];
            copies.extend(copied(from, &self.heaps[other].rows[place]));
        }
        Step::Exchange {
            phase: 0,
            name: "intra-node exchange",
            sends,
            receives,
            copies,
        }
    }

    /// DedupCombine between nodes, and the zeros that are written then.
    fn between(&self) -> (Step, Vec<Copy>) {
        let dedup = &self.sums.dedup;
        let shape = dedup.shape();
        let (node, place) = shape.split(dedup.rank());
        let (mut sends, mut receives, mut zeros) = (Vec::new(), Vec::new(), Vec::new());
        for other in others(node, shape.nodes) {
            let peer = shape.rank(other, place);
            let message = |span: &Span| Message { peer, span: *span };
            sends.extend(self.heaps[other].returned.iter().map(message));
            let (first, others) = self.firsts(other);
            receives.extend(first.iter().map(message));
            zeros.extend(others.iter().map(|row| Copy {
                from: self.zeros,
                to: row.place,
                offset: row.offset,
            }));
        }
        let step = Step::Exchange {
            phase: 1,
            name: "inter-node exchange of sums",
            sends,
            receives,
            copies: Vec::new(),
        };
        (step, zeros)
    }

    /// Of the rows that a node answers, the first of each token, and all others.
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
            to: to.place,
            offset: to.offset,
        })
        .collect()
}
