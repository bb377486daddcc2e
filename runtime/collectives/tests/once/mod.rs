//! Rows of tokens, each for some experts of some ranks, cross to a node once: ranks get what
//! they get straight, and back come sums of what comes back straight.

use crate::interpreter::{Ends, carry, delivered};
use crate::{bytes, carried, shapes, told};
use moesaic_collectives::plan::{self, Block, DedupMap, HopOrder, Plan, RowBytes, Schedule};
use moesaic_collectives::{Element, NodeShape};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// What goes: of each piece one part, or whole pieces over one distance out of some.
#[derive(Clone, Copy, Debug)]
enum Part {
    Rows(usize, usize),
    Ranks(usize, usize),
}

/// Experts of a rank, bytes of a row, what goes, and whether as single messages.
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
        // Every case on few ranks; on many one for each shape.
        let some = CASES.iter().enumerate();
        let some = some.filter(|(at, _)| ranks <= 12 || (ranks + nodes) % CASES.len() == *at);
        for (_, &(experts, row, part, packed)) in some {
            Rows::new(shape, experts, row, part).check(packed);
        }
    }
}

/// Of every rank the tokens that have rows. Rank 1 has none, and those of rank 2 all go to one
/// expert.
#[derive(Debug)]
struct Rows {
    shape: NodeShape,
    experts: usize,
    /// Bytes of one.
    row: usize,
    part: Part,
    /// Tokens by source, rank and expert: all, and those that go.
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
                rows.goes.push(all[rows.cut(all.len(), p, q)].to_vec());
                rows.whole.push(all);
            }
        }
        rows
    }

    fn cut(&self, rows: usize, p: usize, q: usize) -> Range<usize> {
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

    /// Tokens of `p` whose rows go to an expert of `q`.
    fn list(&self, p: usize, q: usize, e: usize) -> &[usize] {
        &self.goes[self.at(p, q, e)]
    }

    fn far(&self, a: usize, b: usize) -> bool {
        self.shape.split(a).0 != self.shape.split(b).0
    }

    /// Ranks and experts in the order of pieces.
    fn peers(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let experts = self.experts;
        (0..self.shape.ranks()).flat_map(move |peer| (0..experts).map(move |e| (peer, e)))
    }

    /// What all ranks send and get, of the data from a rank to another for one expert.
    fn ends(&self, data: &dyn Fn(usize, usize, usize) -> Vec<u8>) -> Vec<Ends> {
        let list = |rank: usize, gets: bool| {
            let piece = |(peer, e): (usize, usize)| {
                let (p, q) = if gets { (peer, rank) } else { (rank, peer) };
                (peer, data(p, q, e))
            };
            let all = self.peers().map(piece);
            all.filter(|(_, data)| !data.is_empty()).collect()
        };
        (0..self.shape.ranks())
            .map(|rank| [list(rank, false), list(rank, true)])
            .collect()
    }

    /// What each rank knows of the rows that cross.
    fn fans(&self) -> Vec<Arc<DedupMap>> {
        let shape = self.shape;
        let whole = |p: usize, q: usize, e: usize| &self.whole[self.at(p, q, e)];
        let hops = HopOrder::inter_first(shape);
        let passages = told(&hops, self.experts, &|p, q, e| whole(p, q, e).len());
        let numbers = |p: usize, node: usize| {
            let there = self.peers().filter(|(q, _)| shape.split(*q).0 == node);
            let tokens = there.flat_map(|(q, e)| whole(p, q, e));
            plan::dedup_indices(tokens.map(|token| *token as u32))
        };
        let cut = |_: usize, block: Block| self.cut(block.units as usize, block.from, block.to);
        let dedup = |(rank, hop_counts)| {
            let (node, place) = shape.split(rank);
            let nodes = 0..shape.nodes;
            let sent = nodes.clone().map(|other| numbers(rank, other)).collect();
            let from = |other| numbers(shape.rank(other, place), node);
            let passed = nodes.map(from).collect();
            let dedup = DedupMap::new(shape, rank, Arc::new(hop_counts), sent, passed).unwrap();
            Arc::new(dedup.in_parts(0..1, &cut))
        };
        passages.into_iter().enumerate().map(dedup).collect()
    }

    fn check(&self, packed: bool) {
        let (fans, ranks) = (self.fans(), self.shape.ranks());
        let data = |p: usize, q: usize, e: usize| -> Vec<u8> {
            let rows = self.list(p, q, e).iter();
            rows.flat_map(|t| bytes(p, *t, 3, self.row)).collect()
        };
        let ends = self.ends(&data);
        let once = |rank: usize, sends: &[_], gets: &[_]| {
            let rows = fans[rank].of_rows(RowBytes::same(self.row));
            carried(rows.plan((rank, ranks), sends, gets).unwrap(), packed)
        };
        let (plans, found) = carry(&ends, &once);
        let (_, straight) = carry(&ends, &plan::exchange);
        assert!(found == straight && delivered(&ends, &found), "{self:?}");
        for (p, plan) in plans.iter().enumerate() {
            let crossed = plan.bytes_to(|peer| self.far(peer, p));
            assert_eq!(crossed, self.crossings(p, &|_, _| true) * self.row);
        }
        // Back: of the ranks of a parity those of the same alone, or all.
        for every in [1, 2] {
            self.check_back(&fans, packed, &|from, to| from % every == to % every);
        }
    }

    /// Tokens of a rank and other nodes that have a row, or an answer, of it.
    fn crossings(&self, p: usize, answers: &dyn Fn(usize, usize) -> bool) -> usize {
        let there = self
            .peers()
            .filter(|(q, _)| self.far(p, *q) && answers(*q, p));
        let rows = there.flat_map(|(q, e)| {
            let node = self.shape.split(q).0;
            self.list(p, q, e).iter().map(move |t| (*t, node))
        });
        rows.collect::<BTreeSet<_>>().len()
    }

    fn check_back(
        &self,
        fans: &[Arc<DedupMap>],
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
        let once = |rank: usize, sends: &[_], gets: &[_]| -> Plan {
            let sums = fans[rank].summed((Element::U8, self.row), &answers);
            carried(sums.plan((rank, ranks), sends, gets).unwrap(), packed)
        };
        let (plans, found) = carry(&ends, &once);
        let (_, straight) = carry(&ends, &plan::exchange);
        // A row returns for each token that a node has an answer for.
        let cross = |(q, plan): (usize, &Plan)| plan.bytes_to(|peer| self.far(peer, q));
        let crossed: usize = plans.iter().enumerate().map(cross).sum();
        let tokens: usize = (0..ranks).map(|p| self.crossings(p, answers)).sum();
        assert_eq!(crossed, tokens * self.row, "{self:?}");
        for p in 0..ranks {
            let [found, straight] =
                [&found, &straight].map(|outputs| self.sums(p, &outputs[p], answers));
            assert!(found == straight, "{self:?}: rank {p}");
        }
    }

    /// What each node has for a token of a rank adds up to this.
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
                let sum = sums.entry((*t, self.shape.split(q).0));
                let sum = sum.or_insert_with(|| vec![0u8; self.row]);
                let both = sum.iter_mut().zip(row);
                both.for_each(|(sum, own)| *sum = sum.wrapping_add(*own));
            }
        }
        sums
    }
}
