//! Deduplicated dispatch and combine: rows of tokens for experts on several ranks cross to a node
//! once. Ranks receive the same rows as directly, and the returned sums equal the sums of the
//! rows that return directly.

use crate::interpreter::{Ends, carry, delivered};
use crate::{bytes, carried, hop_counts, shapes};
use moesaic_collectives::schedules::{
    self, AddendRow, CollectivePlan, DedupMap, GroupRank, HopOrder, RowBlock, RowBytes, Schedule,
};
use moesaic_collectives::{CommElement, NodeRank, NodeShape};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// The rows to send: one chunk of each block, or only blocks over one distance.
#[derive(Clone, Copy, Debug)]
enum Part {
    Rows(usize, usize),
    Ranks(usize, usize),
}

/// Experts of a rank, bytes of a row, rows to send, and whether plans are packed.
const CASES: [(usize, usize, Part, bool); 5] = [
    (1, 5, Part::Rows(0, 1), false),
    (3, 3, Part::Rows(0, 1), true),
    (3, 7, Part::Rows(1, 3), false),
    (2, 1, Part::Ranks(1, 3), false),
    (2, 67, Part::Ranks(0, 2), true),
];

#[test]
fn tokens_cross_to_a_node_once() {
    for (nodes, per_node) in shapes(32) {
        let shape = NodeShape { nodes, per_node };
        let ranks = shape.ranks();
        // All cases on few ranks; one case per shape on many.
        let some = CASES.iter().enumerate();
        let some = some.filter(|(at, _)| ranks <= 12 || (ranks + nodes) % CASES.len() == *at);
        for (_, &(experts, row, part, packed)) in some {
            Rows::new(shape, experts, row, part).check(packed);
        }
    }
}

/// The tokens that have rows, of every rank. Rank 1 has none, and all tokens of rank 2 go to one
/// expert.
#[derive(Debug)]
struct Rows {
    shape: NodeShape,
    experts: usize,
    /// The bytes of a row.
    row: usize,
    part: Part,
    /// Tokens by source, rank and expert: all of them, and those that are sent.
    whole: Vec<Vec<usize>>,
    goes: Vec<Vec<usize>>,
}

impl Rows {
    fn new(shape: NodeShape, experts: usize, row: usize, part: Part) -> Rows {
        let ranks = shape.ranks();
        let chosen = |p: usize, q: usize, e: usize, t: usize| match p {
            2 => q == 0 && e == 0,
            _ => (p * 13 + q * 7 + e * 5 + t * 11 + t * q) % 5 < 2,
        };
        let tokens = |p: usize| if p == 1 { 0 } else { 4 + p % 3 };
        let mut rows = Rows {
            shape,
            experts,
            row,
            part,
            whole: Vec::new(),
            goes: Vec::new(),
        };
        for p in 0..ranks {
            for (q, e) in (0..ranks).flat_map(|q| (0..experts).map(move |e| (q, e))) {
                let all: Vec<usize> = (0..tokens(p)).filter(|t| chosen(p, q, e, *t)).collect();
                rows.goes
                    .push(all[rows.chunk_rows(all.len(), p, q)].to_vec());
                rows.whole.push(all);
            }
        }
        rows
    }

    fn chunk_rows(&self, rows: usize, p: usize, q: usize) -> Range<usize> {
        let ranks = self.shape.ranks();
        match self.part {
            Part::Rows(number, of) => number * rows / of..(number + 1) * rows / of,
            Part::Ranks(number, of) if (q + ranks - p) % ranks % of == number => 0..rows,
            Part::Ranks(..) => 0..0,
        }
    }

    fn at(&self, p: usize, q: usize, e: usize) -> usize {
        (p * self.shape.ranks() + q) * self.experts + e
    }

    /// Returns the tokens of `p` whose rows go to an expert of `q`.
    fn list(&self, p: usize, q: usize, e: usize) -> &[usize] {
        &self.goes[self.at(p, q, e)]
    }

    fn far(&self, a: usize, b: usize) -> bool {
        self.shape.split(a).node != self.shape.split(b).node
    }

    /// Returns ranks and experts in block order.
    fn peers(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let experts = self.experts;
        (0..self.shape.ranks()).flat_map(move |peer| (0..experts).map(move |e| (peer, e)))
    }

    /// Returns what all ranks send and receive, from the data between two ranks for one expert.
    fn ends(&self, data: &dyn Fn(usize, usize, usize) -> Vec<u8>) -> Vec<Ends> {
        let list = |rank: usize, gets: bool| {
            let block = |(peer, e): (usize, usize)| {
                let (p, q) = if gets { (peer, rank) } else { (rank, peer) };
                (peer, data(p, q, e))
            };
            let all = self.peers().map(block);
            all.filter(|(_, data)| !data.is_empty()).collect()
        };
        (0..self.shape.ranks())
            .map(|rank| [list(rank, false), list(rank, true)])
            .collect()
    }

    /// Returns each rank's map of the crossing rows.
    fn dedup_maps(&self) -> Vec<Arc<DedupMap>> {
        let shape = self.shape;
        let whole = |p: usize, q: usize, e: usize| &self.whole[self.at(p, q, e)];
        let hops = HopOrder::inter_first(shape);
        let counts = hop_counts(&hops, self.experts, &|p, q, e| whole(p, q, e).len());
        let numbers = |p: usize, node: usize| {
            let there = self.peers().filter(|(q, _)| shape.split(*q).node == node);
            let tokens = there.flat_map(|(q, e)| whole(p, q, e));
            schedules::dedup_indices(tokens.map(|token| *token as u32))
        };
        let chunk_rows =
            |_: usize, block: RowBlock| self.chunk_rows(block.units as usize, block.from, block.to);
        let dedup = |(rank, hop_counts)| {
            let NodeRank { node, place } = shape.split(rank);
            let nodes = 0..shape.nodes;
            let sent = nodes.clone().map(|other| numbers(rank, other)).collect();
            let from = |other| numbers(shape.rank(other, place), node);
            let passed = nodes.map(from).collect();
            let dedup = DedupMap::new(shape, rank, Arc::new(hop_counts), sent, passed).unwrap();
            Arc::new(dedup.in_parts(0..1, &chunk_rows))
        };
        counts.into_iter().enumerate().map(dedup).collect()
    }

    fn check(&self, packed: bool) {
        let (maps, ranks) = (self.dedup_maps(), self.shape.ranks());
        let data = |p: usize, q: usize, e: usize| -> Vec<u8> {
            let rows = self.list(p, q, e).iter();
            rows.flat_map(|t| bytes(p, *t, 3, self.row)).collect()
        };
        let ends = self.ends(&data);
        let once = |rank: usize, sends: &[_], gets: &[_]| {
            let rows = maps[rank].of_rows(RowBytes::same(self.row));
            carried(
                rows.plan(GroupRank { rank, size: ranks }, sends, gets)
                    .unwrap(),
                packed,
            )
        };
        let (plans, found) = carry(&ends, &once);
        let (_, straight) = carry(&ends, &schedules::exchange);
        assert!(found == straight && delivered(&ends, &found), "{self:?}");
        for (p, plan) in plans.iter().enumerate() {
            let crossed = plan.bytes_to(|peer| self.far(peer, p));
            assert_eq!(crossed, self.crossings(p, &|_, _| true) * self.row);
        }
        // On the way back: only ranks of the sender's parity answer, or all.
        for every in [1, 2] {
            self.check_back(&maps, packed, &|from, to| from % every == to % every);
        }
    }

    /// Returns the number of tokens of a rank with a row, or an answer, on another node, counted
    /// per node.
    fn crossings(&self, p: usize, answers: &dyn Fn(usize, usize) -> bool) -> usize {
        let there = self
            .peers()
            .filter(|(q, _)| self.far(p, *q) && answers(*q, p));
        let rows = there.flat_map(|(q, e)| {
            let node = self.shape.split(q).node;
            self.list(p, q, e).iter().map(move |t| (*t, node))
        });
        rows.collect::<BTreeSet<_>>().len()
    }

    fn check_back(
        &self,
        maps: &[Arc<DedupMap>],
        packed: bool,
        answers: &dyn Fn(usize, usize) -> bool,
    ) {
        let ranks = self.shape.ranks();
        let answer = |q: usize, p: usize, e: usize| -> Vec<u8> {
            let rows = self.list(p, q, e).iter().filter(|_| answers(q, p));
            rows.flat_map(|t| bytes(p + e, t + 5 * q, 1, self.row))
                .collect()
        };
        let ends = self.ends(&answer);
        let once = |rank: usize, sends: &[_], gets: &[_]| -> CollectivePlan {
            let sums = maps[rank].summed(
                AddendRow {
                    element: CommElement::U8,
                    bytes: self.row,
                },
                &answers,
            );
            carried(
                sums.plan(GroupRank { rank, size: ranks }, sends, gets)
                    .unwrap(),
                packed,
            )
        };
        let (plans, found) = carry(&ends, &once);
        let (_, straight) = carry(&ends, &schedules::exchange);
        // One row returns for each token that a node has an answer for.
        let cross = |(q, plan): (usize, &CollectivePlan)| plan.bytes_to(|peer| self.far(peer, q));
        let crossed: usize = plans.iter().enumerate().map(cross).sum();
        let tokens: usize = (0..ranks).map(|p| self.crossings(p, answers)).sum();
        assert_eq!(crossed, tokens * self.row, "{self:?}");
        for p in 0..ranks {
            let [found, straight] =
                [&found, &straight].map(|outputs| self.sums(p, &outputs[p], answers));
            assert!(found == straight, "{self:?}: rank {p}");
        }
    }

    /// Returns the sums of each node for the tokens of a rank.
    fn sums(
        &self,
        p: usize,
        outputs: &[Vec<u8>],
        answers: &dyn Fn(usize, usize) -> bool,
    ) -> BTreeMap<(usize, usize), Vec<u8>> {
        let mut sums = BTreeMap::new();
        let there = self.peers().filter(|(q, _)| answers(*q, p));
        let there = there.filter(|(q, e)| !self.list(p, *q, *e).is_empty());
        for ((q, e), data) in there.zip(outputs) {
            for (row, t) in data.chunks(self.row).zip(self.list(p, q, e)) {
                let sum = sums.entry((*t, self.shape.split(q).node));
                let sum = sum.or_insert_with(|| vec![0u8; self.row]);
                let both = sum.iter_mut().zip(row);
                both.for_each(|(sum, own)| *sum = sum.wrapping_add(*own));
            }
        }
        sums
    }
}
