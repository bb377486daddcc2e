//! Rows for the experts of each rank, dispatched in chunks and returned: each time they must
//! arrive in their own place.

use crate::interpreter::{Ends, carry, delivered};
use crate::{algorithms, bytes, carried, hop_counts, hops, shapes, size};
use moesaic_collectives::Algorithm;
use moesaic_collectives::schedules::{self, HopCounts, RowBlock};
use std::ops::Range;

const DEGREES: [usize; 5] = [1, 2, 3, 4, 8];

/// Bytes of a row: not a multiple of a word, and a single byte.
const ROWS: [usize; 4] = [1, 3, 5, 67];

/// Every combination of these experts and chunks, on few ranks.
#[test]
fn rows_of_experts_go_in_parts_and_come_back() {
    for (nodes, per_node) in shapes(4) {
        for algorithm in algorithms(nodes, per_node) {
            for experts in 1..=4 {
                for (i, degree) in DEGREES.into_iter().enumerate() {
                    let row = ROWS[(experts + i) % ROWS.len()];
                    Drawn::new(algorithm, [experts, degree, row, i]).check();
                }
            }
        }
    }
}

/// Some combinations for every number of ranks and ranks per node; on more than 16 ranks with
/// half of the algorithms.
#[test]
fn rows_drawn_on_any_nodes_go_in_parts_and_come_back() {
    for (nodes, per_node) in shapes(32) {
        let few = nodes * per_node <= 16;
        let all = algorithms(nodes, per_node).into_iter().enumerate();
        for (i, algorithm) in all.filter(|(i, _)| few || (i + nodes).is_multiple_of(2)) {
            let mut seed = (nodes * 1009 + per_node * 31 + i) as u64;
            let mut draw = |most: usize| {
                seed = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(7);
                (seed >> 33) as usize % most
            };
            let experts = 1 + draw(5);
            let (degree, row) = (DEGREES[draw(5)], ROWS[draw(3)]);
            Drawn::new(algorithm, [experts, degree, row, draw(4)]).check();
        }
    }
}

#[derive(Debug)]
struct Drawn {
    algorithm: Algorithm,
    ranks: usize,
    experts: usize,
    degree: usize,
    /// The bytes of a row.
    row: usize,
    /// The counts that are zero in addition to a third of all: none, those from one rank, those
    /// to one rank, or all.
    empty: usize,
}

impl Drawn {
    fn new(algorithm: Algorithm, [experts, degree, row, empty]: [usize; 4]) -> Drawn {
        Drawn {
            algorithm,
            ranks: hops(algorithm).levels.ranks(),
            experts,
            degree,
            row,
            empty,
        }
    }

    /// Returns the rows of a rank for an expert of another.
    fn rows(&self, p: usize, q: usize, e: usize) -> usize {
        let (last, none) = (self.ranks - 1, self.empty);
        let empty = (none == 1 && p == last) || (none == 2 && q == last) || none == 3;
        if empty { 0 } else { size(p, q, e) % 11 }
    }

    /// Returns the rows of a block that a chunk covers.
    fn chunk_rows(&self, number: usize, rows: usize) -> Range<usize> {
        number * rows / self.degree..(number + 1) * rows / self.degree
    }

    fn check(&self) {
        let counts = hop_counts(&hops(self.algorithm), self.experts, &|p, q, e| {
            self.rows(p, q, e)
        });
        // Chunks one by one (on many ranks one of them), and two that are in flight at once.
        let single = (0..self.degree).filter(|number| self.ranks <= 8 || number % 4 == 1);
        let single = single.map(|number| number..number + 1);
        for parts in single.chain(std::iter::once(0..self.degree.min(2))) {
            let chunk_rows =
                |number: usize, block: RowBlock| self.chunk_rows(number, block.units as usize);
            let counts = counts
                .iter()
                .map(|all| all.in_parts(parts.clone(), &chunk_rows));
            let counts: Vec<HopCounts> = counts.collect();
            for back in [false, true] {
                self.check_parts(&counts, &parts, back);
            }
        }
    }

    fn check_parts(&self, counts: &[HopCounts], parts: &Range<usize>, back: bool) {
        // Returned rows may have another width.
        let row = self.row + usize::from(back);
        let scale = |block: RowBlock| block.units as usize * row;
        let ends: Vec<Ends> = (0..self.ranks)
            .map(|rank| [back, !back].map(|gets| self.messages(rank, gets, parts, row)))
            .collect();
        let plan = |rank: usize, sends: &[_], gets: &[_]| {
            let schedule = if back {
                counts[rank].back(&scale)
            } else {
                counts[rank].there(&scale)
            };
            let plan = schedules::exchange_with(&schedule, sends, gets);
            carried(plan, self.degree.is_multiple_of(2))
        };
        let (_, found) = carry(&ends, &plan);
        let (_, straight) = carry(&ends, &schedules::exchange);
        let right = found == straight && delivered(&ends, &found);
        assert!(right, "{self:?}, parts {parts:?}, back: {back}");
    }

    /// Returns the messages for a rank's rows to experts, or for the rows of its own experts,
    /// chunk by chunk.
    fn messages(
        &self,
        rank: usize,
        gets: bool,
        parts: &Range<usize>,
        row: usize,
    ) -> Vec<(usize, Vec<u8>)> {
        let experts = 0..self.experts;
        let blocks = parts
            .clone()
            .flat_map(|n| experts.clone().map(move |e| (n, e)));
        let message = |(number, e): (usize, usize), peer: usize| {
            let (p, q) = if gets { (peer, rank) } else { (rank, peer) };
            let rows = self.chunk_rows(number, self.rows(p, q, e));
            let whole = bytes(p, q, e, self.rows(p, q, e) * row);
            (peer, whole[rows.start * row..rows.end * row].to_vec())
        };
        let all = blocks.flat_map(|block| (0..self.ranks).map(move |peer| message(block, peer)));
        all.filter(|(_, data)| !data.is_empty()).collect()
    }
}
