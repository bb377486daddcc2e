//! The contents of one chunk of a pass.

use crate::reach::Alike;
use moesaic_plan::{Chunk, OverlapBy, Parallel};

/// The experts that a rank's tokens choose evenly.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Choices {
    /// The tokens of the rank.
    pub tokens: f64,
    /// The experts of a token.
    pub top_k: usize,
    /// The number of experts.
    pub experts: f64,
    /// The nodes that hold the experts.
    pub nodes: Vec<Alike>,
}

/// The positions among the tokens at which probabilities are evaluated.
const PLACES: usize = 32;

impl Choices {
    /// Returns the mean number of chunks of a node's rows, out of `chunks`, in which a token with
    /// rows there appears. [`OverlapBy::Rows`] splits the rows of each expert by their index.
    /// Rows lie in token order, so a token is about equally far into the rows of each of its
    /// experts. The difference is the spread of a Brownian bridge: a random walk over the tokens
    /// whose end is known.
    pub fn chunks_touched(&self, chunks: usize) -> f64 {
        if chunks < 2 {
            return 1.0;
        }
        let hits = self.hits();
        let in_chunk = |chance: f64| -> f64 {
            let some_of = |n: i32| 1.0 - (1.0 - chance).powi(n);
            hits.iter().zip(0..).map(|(hit, n)| hit * some_of(n)).sum()
        };
        // Midpoints, so that the mean over places is the midpoint rule of an integral.
        let places = (0..PLACES).map(|at| (at as f64 + 0.5) / PLACES as f64);
        let chances = places.flat_map(|u| self.chances(u, chunks));
        let sum: f64 = chances.map(in_chunk).sum();
        let crosses = 1.0 - hits[0];
        sum / PLACES as f64 / crosses.max(f64::MIN_POSITIVE)
    }

    /// Returns the probabilities that 0, 1, … of a token's experts are on a node: the mean over
    /// nodes.
    fn hits(&self) -> Vec<f64> {
        let all: f64 = self.nodes.iter().map(|alike| alike.nodes).sum();
        let mut hits = vec![0.0; self.top_k + 1];
        for alike in &self.nodes {
            let own = alike.reach.hits(self.top_k, self.top_k);
            let part = alike.nodes / all;
            hits.iter_mut()
                .zip(own)
                .for_each(|(sum, n)| *sum += part * n);
        }
        hits
    }

    /// Returns the probability that the row of a token at position `u` of all tokens is in each
    /// chunk of an expert.
    fn chances(&self, u: f64, chunks: usize) -> Vec<f64> {
        let part = (self.top_k as f64 / self.experts).min(1.0);
        let rows = (self.tokens * part).max(1.0);
        // The variance of a Brownian bridge at `u`, scaled by the number of rows of an expert.
        let spread = (u * (1.0 - u) * (1.0 - part) / rows).sqrt().max(1e-9);
        let before = |chunk: usize| match chunk {
            0 => 0.0,
            last if last == chunks => 1.0,
            _ => below((chunk as f64 / chunks as f64 - u) / spread),
        };
        (0..chunks).map(|i| before(i + 1) - before(i)).collect()
    }
}

/// Approximates the normal distribution by a logistic curve, to within 0.01.
fn below(x: f64) -> f64 {
    1.0 / (1.0 + (-1.702 * x).exp())
}

/// The part of a whole pass that one chunk has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ChunkShare {
    /// The part of the rows for other ranks.
    pub others: f64,
    /// The part of the messages.
    pub peers: f64,
    /// The part of the rows that a rank keeps.
    pub own: f64,
    /// The part of the rows that GEMMs process.
    pub products: f64,
    /// The number of launches of each GEMM: more than one where the other pass has other chunks.
    pub launches: usize,
}

impl ChunkShare {
    pub const WHOLE: ChunkShare = ChunkShare {
        others: 1.0,
        peers: 1.0,
        own: 1.0,
        products: 1.0,
        launches: 1,
    };

    /// Returns the chunks of a pass over a mesh in which rows go to `adaptive_r` shards; GEMMs
    /// are launched for `launched` chunks. With [`OverlapBy::Peers`], rows are assumed to be
    /// spread evenly over distances.
    pub fn all(
        (of, launched): (usize, usize),
        overlap_by: OverlapBy,
        mesh: Parallel,
        adaptive_r: usize,
    ) -> Vec<ChunkShare> {
        // Rows that stay have no distance to other ranks, so all of them are in one group.
        let groups = if adaptive_r == 0 { 1 } else { mesh.ep };
        let part = |number: usize| {
            let chunk = Chunk {
                number,
                of,
                by: overlap_by,
            };
            ChunkShare {
                launches: chunk.units(launched).len(),
                ..ChunkShare::of(chunk, groups, mesh.expert_tp)
            }
        };
        (0..of).map(part).collect()
    }

    /// Returns the part of GEMM rows that one launch processes.
    pub fn launched(&self) -> f64 {
        self.products / self.launches.max(1) as f64
    }

    fn of(chunk: Chunk, groups: usize, expert_tp: usize) -> ChunkShare {
        if chunk.by == OverlapBy::Rows {
            let part = 1.0 / chunk.of as f64;
            // Each chunk has rows for every peer, so its messages are smaller and as many.
            return ChunkShare {
                others: part,
                own: part,
                products: part,
                ..ChunkShare::WHOLE
            };
        }
        let distances = chunk.distances(groups);
        let own = usize::from(distances.contains(&0));
        let others = distances.len() * expert_tp - own;
        let of_all = others as f64 / (groups * expert_tp - 1).max(1) as f64;
        ChunkShare {
            others: of_all,
            peers: of_all,
            own: own as f64,
            products: distances.len() as f64 / groups as f64,
            launches: 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reach::Reach;

    /// Draws tokens with `top_k` of `experts` experts each, `here` of them on the node, for
    /// comparison.
    fn drawn(choices: &Choices, here: usize, chunks: usize) -> f64 {
        let (tokens, experts) = (choices.tokens as usize, choices.experts as usize);
        let mut state = 1u64;
        let mut random = |n: usize| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (state >> 33) as usize % n
        };
        let (mut touched, mut with) = (0, 0);
        for _ in 0..200 {
            let ids: Vec<Vec<usize>> = (0..tokens)
                .map(|_| {
                    let mut all: Vec<usize> = (0..experts).collect();
                    (0..choices.top_k)
                        .map(|_| all.swap_remove(random(all.len())))
                        .collect()
                })
                .collect();
            let count = |expert: usize| ids.iter().flatten().filter(|id| **id == expert).count();
            let counts: Vec<usize> = (0..experts).map(count).collect();
            let mut before = vec![0; experts];
            for own in &ids {
                let mut of = std::collections::BTreeSet::new();
                for &id in own.iter().filter(|id| **id < here) {
                    let overlap_by = |i: usize| i * counts[id] / chunks;
                    of.extend(
                        (0..chunks)
                            .filter(|i| (overlap_by(*i)..overlap_by(i + 1)).contains(&before[id])),
                    );
                }
                own.iter().for_each(|id| before[*id] += 1);
                touched += of.len();
                with += usize::from(!of.is_empty());
            }
        }
        touched as f64 / with as f64
    }

    #[test]
    fn a_token_is_in_as_many_chunks_as_drawn_ones_are() {
        for (tokens, experts, top_k, here) in [
            (64, 8, 4, 2),
            (64, 16, 2, 4),
            (256, 16, 4, 4),
            (512, 32, 8, 16),
            (256, 4, 4, 1),
            (256, 4, 4, 2),
        ] {
            let choices = Choices {
                tokens: f64::from(tokens),
                top_k,
                experts: f64::from(experts),
                nodes: vec![Alike {
                    reach: Reach::ungrouped(f64::from(here), f64::from(experts - here)),
                    nodes: 1.0,
                }],
            };
            for chunks in [1, 2, 4, 8] {
                let (found, real) = (
                    choices.chunks_touched(chunks),
                    drawn(&choices, here as usize, chunks),
                );
                assert!(
                    (found / real - 1.0).abs() < 0.03,
                    "{choices:?}, {chunks}: {found} {real}"
                );
            }
        }
    }

    #[test]
    fn parts_make_up_the_whole() {
        for (ep, expert_tp, adaptive_r) in [(1, 1, 1), (4, 1, 1), (7, 2, 2), (4, 2, 0)] {
            let mesh = Parallel {
                ep,
                expert_tp,
                ..Parallel::default()
            };
            for overlap_by in [OverlapBy::Rows, OverlapBy::Peers] {
                for of in [1, 2, 4, 8] {
                    let parts = ChunkShare::all((of, of), overlap_by, mesh, adaptive_r);
                    let sum = |part: fn(&ChunkShare) -> f64| parts.iter().map(part).sum::<f64>();
                    assert!((sum(|part| part.products) - 1.0).abs() < 1e-12);
                    assert!((sum(|part| part.own) - 1.0).abs() < 1e-12);
                    if adaptive_r > 0 && ep * expert_tp > 1 {
                        assert!((sum(|part| part.others) - 1.0).abs() < 1e-12);
                    }
                }
            }
        }
    }

    /// The first chunk holds the rank's own rows, and every message is in exactly one chunk.
    #[test]
    fn chunks_by_ranks_have_a_part_of_the_messages() {
        let mesh = Parallel {
            ep: 4,
            ..Parallel::default()
        };
        let parts = ChunkShare::all((4, 4), OverlapBy::Peers, mesh, 1);
        let peers: Vec<f64> = parts.iter().map(|part| 3.0 * part.peers).collect();
        assert_eq!(peers, [0.0, 1.0, 1.0, 1.0]);
        assert_eq!(parts[0].own, 1.0);
        let by_rows = ChunkShare::all((4, 4), OverlapBy::Rows, mesh, 1);
        assert!(by_rows.iter().all(|part| part.peers == 1.0));
    }

    /// With `overlap_degree=2/4`, forward launches the chunks of backward.
    #[test]
    fn a_chunk_is_launched_in_the_parts_that_both_passes_have() {
        let mesh = Parallel::default();
        let launches = |of, overlap_by, launched| -> Vec<usize> {
            let parts = ChunkShare::all((of, launched), overlap_by, mesh, 1);
            parts.iter().map(|part| part.launches).collect()
        };
        assert_eq!(launches(2, OverlapBy::Rows, 4), [2, 2]);
        assert_eq!(launches(1, OverlapBy::Rows, 4), [4]);
        assert_eq!(launches(4, OverlapBy::Rows, 4), [1; 4]);
        // The first chunk is the same in both passes; the seven others make up three.
        assert_eq!(launches(4, OverlapBy::Peers, 22), [1, 7, 7, 7]);
        assert_eq!(
            ChunkShare::all((1, 4), OverlapBy::Rows, mesh, 1)[0].launched(),
            0.25
        );
    }
}
