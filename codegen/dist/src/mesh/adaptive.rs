//! Adaptive parallelism: rows that go to fewer shards of an expert than its weights are stored in.
//! The degree is the `r` of Tutel (Hwang et al., MLSys 2023, section 3.1).
//!
//! Weights stay with their owners. At degree `r` the `s` owners of an expert form `r` blocks of `s
//! / r` consecutive ranks. Each block gathers one `r`th of the expert, so all of its ranks can
//! multiply with the same weights, and each rank of the block takes a share of the rows: its index
//! `j` in the block becomes one more `dp` coordinate. Rows are therefore exchanged in a mesh of
//! `ep`, `r` and `dp * s / r`, which has the same ranks in another order. At `r = 0` a block is all
//! ranks that hold the experts once; each rank gathers all experts, and rows stay on their rank.

use super::{Parallel, RankCoords, SharedExperts};
use crate::StrategyError;
use std::ops::Range;

/// A mesh in which weights are stored, together with the adaptive parallelism degree of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptiveMesh {
    weights: Parallel,
    adaptive_r: usize,
}

impl AdaptiveMesh {
    /// # Errors
    /// [`StrategyError::AdaptiveMesh`] for a number that is neither 0 nor a divisor of the shards.
    pub fn new(weights: Parallel, adaptive_r: usize) -> Result<AdaptiveMesh, StrategyError> {
        let expert_tp = weights.expert_tp;
        if adaptive_r == 0 || expert_tp.is_multiple_of(adaptive_r) {
            Ok(AdaptiveMesh {
                weights,
                adaptive_r,
            })
        } else {
            Err(StrategyError::AdaptiveMesh {
                adaptive_r,
                expert_tp,
            })
        }
    }

    /// Returns the mesh of a plan's degree, which [`AdaptiveMesh::new`] accepted before the plan was
    /// made.
    pub fn planned(weights: Parallel, adaptive_r: usize) -> AdaptiveMesh {
        AdaptiveMesh {
            weights,
            adaptive_r,
        }
    }

    /// Returns `self` if experts may have up to `shadows` shadows at this degree.
    ///
    /// # Errors
    /// [`StrategyError::Shadows`] where experts are in shards, or rows stay.
    pub fn shadowing(self, shadows: usize) -> Result<AdaptiveMesh, StrategyError> {
        let (adaptive_r, expert_tp) = (self.adaptive_r, self.weights.expert_tp);
        if shadows == 0 || (adaptive_r, expert_tp) == (1, 1) {
            Ok(self)
        } else {
            Err(StrategyError::Shadows {
                shadows,
                expert_tp,
                adaptive_r,
            })
        }
    }

    /// Returns every degree that a mesh allows, ascending.
    pub fn all(weights: Parallel) -> Vec<usize> {
        let divides = |adaptive_r: &usize| weights.expert_tp.is_multiple_of(*adaptive_r);
        let divisors = (1..=weights.expert_tp).filter(divides);
        [0].into_iter().chain(divisors).collect()
    }

    /// Returns the number of shards that a row goes to; 0 where rows stay.
    pub fn adaptive_r(&self) -> usize {
        self.adaptive_r
    }

    /// Returns whether every rank multiplies with the weights that it owns, so no weight travels.
    pub fn is_owner_only(&self) -> bool {
        self.adaptive_r == self.weights.expert_tp
    }

    /// Returns the number of stored shards that make up one shard to multiply with.
    pub fn width(&self) -> usize {
        self.weights.expert_tp / self.adaptive_r.max(1)
    }

    /// Returns the mesh in which rows are exchanged.
    pub fn mesh(&self) -> Parallel {
        let Parallel { ep, dp, .. } = self.weights;
        let (ep, expert_tp, dp) = match self.adaptive_r {
            // Rows stay, so every rank is a group of its own that holds all experts.
            0 => (1, 1, self.weights.ranks()),
            adaptive_r => (ep, adaptive_r, dp * self.width()),
        };
        Parallel {
            ep,
            expert_tp,
            dp,
            // Tokens for shards of shared experts go by the stored mesh, whatever the degree of the
            // routed ones.
            shared: SharedExperts::Whole,
        }
    }

    /// Returns the coordinates of a rank in that mesh.
    pub fn place(&self, rank: usize) -> RankCoords {
        if self.adaptive_r == 0 {
            let (ep, tp) = (0, 0);
            return RankCoords { dp: rank, ep, tp };
        }
        let Parallel { ep, expert_tp, .. } = self.weights;
        let (width, owner) = (self.width(), rank % expert_tp);
        RankCoords {
            dp: rank / (ep * expert_tp) * width + owner % width,
            ep: rank / expert_tp % ep,
            tp: owner / width,
        }
    }

    /// Returns the rank at some coordinates of that mesh: the inverse of [`AdaptiveMesh::place`].
    pub fn rank(&self, place: RankCoords) -> usize {
        if self.adaptive_r == 0 {
            return place.dp;
        }
        let Parallel { ep, expert_tp, .. } = self.weights;
        let (width, RankCoords { dp, tp, .. }) = (self.width(), place);
        (dp / width * ep + place.ep) * expert_tp + tp * width + dp % width
    }

    /// Returns the number of ranks that own the weights one rank multiplies with.
    pub fn owners(&self) -> usize {
        match self.adaptive_r {
            0 => self.weights.group(),
            _ => self.width(),
        }
    }

    /// Returns the block of a rank: the ranks that gather each other's weights.
    pub fn block(&self, rank: usize) -> Range<usize> {
        let size = self.owners();
        // Shards of an expert are on consecutive ranks, so a block is a range and never crosses two
        // experts' shards.
        let first = rank / size * size;
        first..first + size
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::meshes;

    #[test]
    fn every_rank_has_one_place_at_any_degree() {
        for mesh in meshes() {
            for adaptive_r in AdaptiveMesh::all(mesh) {
                let by = AdaptiveMesh::new(mesh, adaptive_r).unwrap();
                assert_eq!(by.mesh().ranks(), mesh.ranks());
                for rank in 0..mesh.ranks() {
                    let place = by.place(rank);
                    assert_eq!(by.rank(place), rank, "{mesh:?}, {adaptive_r} adaptive_r");
                    assert!(!by.is_owner_only() || mesh.place(rank) == Ok(place));
                    // Each rank of a block multiplies with the same weights for other tokens.
                    let block = by.block(rank);
                    assert!(block.contains(&rank));
                    let kept = |rank: usize| (by.place(rank).ep, by.place(rank).tp);
                    assert!(block.clone().all(|other| kept(other) == kept(rank)));
                    let others = block.map(|rank| by.place(rank).dp);
                    let others: std::collections::BTreeSet<_> = others.collect();
                    assert_eq!(others.len(), by.owners());
                }
            }
            let more = mesh.expert_tp + 1;
            assert!(AdaptiveMesh::new(mesh, more).is_err());
        }
    }
}
