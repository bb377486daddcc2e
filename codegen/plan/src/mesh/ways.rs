//! Rows that go to fewer slices than weights have: adaptive parallelism, whose degree is the
//! `r` of Tutel (Hwang et al., MLSys 2023, section 3.1).
//!
//! Weights stay where their owners have them. At `r` ways an expert's `s` owners are `r`
//! blocks of `s / r` ranks in a row. Each block gathers one `r`th of the expert, so that
//! every rank of it can do what the others can, and takes the rows of its own part of all
//! ranks: place `j` in a block is one more `dp` coordinate. So rows travel in a mesh of
//! `ep`, `r` and `dp * s / r`, with the same ranks in another order. At 0 ways a block is
//! all ranks that hold the experts once, each gathers all of them, and rows stay.

use super::{Parallel, Place, RankPlan, SharedExperts, StrategyError};
use crate::TensorId;
use std::ops::Range;

/// To how many slices of its expert a row goes, in a mesh by which weights are shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ways {
    weights: Parallel,
    ways: usize,
}

impl Ways {
    /// # Errors
    /// [`StrategyError::Ways`] for a number that is neither 0 nor a divisor of the slices.
    pub fn new(weights: Parallel, ways: usize) -> Result<Ways, StrategyError> {
        let shards = weights.shards;
        match ways == 0 || shards.is_multiple_of(ways) {
            true => Ok(Ways { weights, ways }),
            false => Err(StrategyError::Ways { ways, shards }),
        }
    }

    /// All that a mesh can have, ascending.
    pub fn all(weights: Parallel) -> Vec<usize> {
        let divides = |ways: &usize| weights.shards.is_multiple_of(*ways);
        let divisors = (1..=weights.shards).filter(divides);
        [0].into_iter().chain(divisors).collect()
    }

    /// To how many slices; 0 where rows stay.
    pub fn count(&self) -> usize {
        self.ways
    }

    /// Whether every rank multiplies with what it owns, and no weight travels.
    pub fn own_alone(&self) -> bool {
        self.ways == self.weights.shards
    }

    /// Slices of an owner in one that a rank multiplies with.
    pub fn width(&self) -> usize {
        self.weights.shards / self.ways.max(1)
    }

    /// The mesh that rows travel in.
    pub fn mesh(&self) -> Parallel {
        let Parallel { ep, dp, .. } = self.weights;
        let (ep, shards, dp) = match self.ways {
            0 => (1, 1, self.weights.ranks()),
            ways => (ep, ways, dp * self.width()),
        };
        Parallel {
            ep,
            shards,
            dp,
            shared: SharedExperts::Whole,
        }
    }

    /// Where a rank is in that mesh.
    pub fn place(&self, rank: usize) -> Place {
        if self.ways == 0 {
            let (ep, shard) = (0, 0);
            return Place {
                dp: rank,
                ep,
                shard,
            };
        }
        let Parallel { ep, shards, .. } = self.weights;
        let (width, owner) = (self.width(), rank % shards);
        Place {
            dp: rank / (ep * shards) * width + owner % width,
            ep: rank / shards % ep,
            shard: owner / width,
        }
    }

    /// The rank at a place of that mesh.
    pub fn rank(&self, place: Place) -> usize {
        if self.ways == 0 {
            return place.dp;
        }
        let Parallel { ep, shards, .. } = self.weights;
        let (width, Place { dp, shard, .. }) = (self.width(), place);
        (dp / width * ep + place.ep) * shards + shard * width + dp % width
    }

    /// The ranks that gather each other's weights: those of a rank's block.
    pub fn block(&self, rank: usize) -> Range<usize> {
        let size = match self.ways {
            0 => self.weights.group(),
            _ => self.width(),
        };
        let first = rank / size * size;
        first..first + size
    }
}

/// Where in a tensor of a rank's experts' side the part of one owner lies: rows of elements in
/// a row, so many elements from one row to the next. The owner has them without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strip {
    /// Which rank of the block.
    pub owner: usize,
    /// Where the first row begins.
    pub first: usize,
    /// How many there are.
    pub rows: usize,
    /// Elements of one.
    pub row: usize,
    /// Elements from one row's start to the next one's.
    pub stride: usize,
}

impl Strip {
    /// All elements.
    pub fn elements(&self) -> usize {
        self.rows * self.row
    }
}

impl RankPlan {
    /// How rows travel.
    pub fn by(&self) -> Ways {
        let (weights, ways) = (self.mesh, self.ways);
        Ways { weights, ways }
    }

    /// The experts that this rank multiplies with: its own, or those of all ranks.
    pub fn experts_here(&self) -> Range<usize> {
        let (by, rank) = (self.by(), self.mesh.rank(self.place));
        let experts = self.tokens.spec.shape.experts;
        by.mesh().experts(by.place(rank).ep, experts)
    }

    /// The parts of a weight of the experts' side, or of its gradient, that the ranks of this
    /// one's block own, in the order of ranks; slices cut it along dimension `cut`, if they
    /// do. What they do not cut, the last bias, the first of them owns alone.
    pub fn strips(&self, tensor: TensorId, cut: Option<usize>) -> Vec<Strip> {
        let shape = &self.experts[tensor].shape;
        let shape: Vec<usize> = shape.iter().map(|size| size.eval(0) as usize).collect();
        let by = self.by();
        let block = by.block(self.mesh.rank(self.place));
        let owners = block.clone().map(|rank| (rank - block.start, rank));
        let strip = |(owner, rank)| self.strip(&shape, cut, owner, rank);
        owners.filter_map(strip).collect()
    }

    fn strip(
        &self,
        shape: &[usize],
        cut: Option<usize>,
        owner: usize,
        rank: usize,
    ) -> Option<Strip> {
        let (width, slice) = (
            self.by().width(),
            rank % self.mesh.shards % self.by().width(),
        );
        if cut.is_none() && slice > 0 {
            return None;
        }
        let ep = rank / self.mesh.shards % self.mesh.ep;
        let all = self.tokens.spec.shape.experts;
        let (theirs, here) = (self.mesh.experts(ep, all), self.experts_here().start);
        let (before, behind) = shape.split_at(cut.unwrap_or(1));
        let rows = theirs.len() * before[1..].iter().product::<usize>();
        let stride: usize = behind.iter().product();
        let row = cut.map_or(stride, |_| stride / width);
        let first = (theirs.start - here) * shape[1..].iter().product::<usize>() + slice * row;
        Some(match row == stride {
            true => Strip {
                owner,
                first,
                rows: 1,
                row: rows * row,
                stride: rows * row,
            },
            false => Strip {
                owner,
                first,
                rows,
                row,
                stride,
            },
        })
    }
}

/// The dimension of a weight of experts, by its name, along which slices cut it: the hidden
/// one. `None` for the last bias, which the first slice has.
pub(super) fn cut_of(name: &str) -> Option<usize> {
    match name.rsplit_once("experts.")?.1 {
        "gate.weight" | "up.weight" | "gate.bias" | "up.bias" => Some(1),
        "down.weight" => Some(2),
        _ => None,
    }
}
