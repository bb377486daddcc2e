//! Rows that go to fewer shards than weights have: adaptive parallelism, whose degree is the
//! `r` of Tutel (Hwang et al., MLSys 2023, section 3.1).
//!
//! Weights stay where their owners have them. At `r` ways an expert's `s` owners are `r`
//! blocks of `s / r` ranks in a row. Each block gathers one `r`th of the expert, so that
//! every rank of it can do what the others can, and takes the rows of its own part of all
//! ranks: place `j` in a block is one more `dp` coordinate. So rows travel in a mesh of
//! `ep`, `r` and `dp * s / r`, with the same ranks in another order. At r = 0 a block is
//! all ranks that hold the experts once, each gathers all of them, and rows stay.

use super::{Parallel, RankCoords, RankPlan, SharedExperts, StrategyError};
use crate::{Placement, TensorId};
use std::ops::Range;

/// To how many shards of its expert a row goes, in a mesh by which weights are shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptiveMesh {
    pub(super) weights: Parallel,
    pub(super) adaptive_r: usize,
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

    /// The same, if at most so many experts may have shadows at it.
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

    /// All that a mesh can have, ascending.
    pub fn all(weights: Parallel) -> Vec<usize> {
        let divides = |adaptive_r: &usize| weights.expert_tp.is_multiple_of(*adaptive_r);
        let divisors = (1..=weights.expert_tp).filter(divides);
        [0].into_iter().chain(divisors).collect()
    }

    /// To how many shards; 0 where rows stay.
    pub fn count(&self) -> usize {
        self.adaptive_r
    }

    /// Whether every rank multiplies with what it owns, and no weight travels.
    pub fn is_owner_only(&self) -> bool {
        self.adaptive_r == self.weights.expert_tp
    }

    /// Slices of an owner in one that a rank multiplies with.
    pub fn width(&self) -> usize {
        self.weights.expert_tp / self.adaptive_r.max(1)
    }

    /// The mesh that rows travel in.
    pub fn mesh(&self) -> Parallel {
        let Parallel { ep, dp, .. } = self.weights;
        let (ep, expert_tp, dp) = match self.adaptive_r {
            0 => (1, 1, self.weights.ranks()),
            adaptive_r => (ep, adaptive_r, dp * self.width()),
        };
        Parallel {
            ep,
            expert_tp,
            dp,
            shared: SharedExperts::Whole,
        }
    }

    /// Where a rank is in that mesh.
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

    /// The rank at a place of that mesh.
    pub fn rank(&self, place: RankCoords) -> usize {
        if self.adaptive_r == 0 {
            return place.dp;
        }
        let Parallel { ep, expert_tp, .. } = self.weights;
        let (width, RankCoords { dp, tp, .. }) = (self.width(), place);
        (dp / width * ep + place.ep) * expert_tp + tp * width + dp % width
    }

    /// How many ranks own what one multiplies with.
    pub fn owners(&self) -> usize {
        match self.adaptive_r {
            0 => self.weights.group(),
            _ => self.width(),
        }
    }

    /// The ranks that gather each other's weights: those of a rank's block.
    pub fn block(&self, rank: usize) -> Range<usize> {
        let size = self.owners();
        let first = rank / size * size;
        first..first + size
    }
}

/// Where in a tensor of a rank's expert part a part of one owner lies: rows of elements in a
/// row, so many elements from one row to the next. The owner has them without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardRegion {
    /// Which rank of the block.
    pub owner: usize,
    /// Where the owner's own tensor has them.
    pub own: usize,
    /// Where the first row begins.
    pub first: usize,
    /// How many there are.
    pub rows: usize,
    /// Elements of one.
    pub row: usize,
    /// Elements from one row's start to the next one's.
    pub stride: usize,
}

impl ShardRegion {
    /// All elements.
    pub fn elements(&self) -> usize {
        self.rows * self.row
    }
}

impl RankPlan {
    /// How rows travel.
    pub fn by(&self) -> AdaptiveMesh {
        let (weights, adaptive_r) = (self.mesh, self.adaptive_r);
        AdaptiveMesh {
            weights,
            adaptive_r,
        }
    }

    /// Which groups of the mesh that rows travel in multiply with which experts: where rows
    /// stay, each with all of them in order.
    pub fn row_placement(&self) -> Placement {
        match self.adaptive_r {
            0 => Placement::contiguous(1, self.tokens.spec.shape.experts),
            _ => self.placement(),
        }
    }

    /// The experts that this rank multiplies with: its own, or those of all ranks.
    pub fn experts_here(&self) -> Vec<usize> {
        let place = self.by().place(self.mesh.rank(self.place));
        self.row_placement().of(place.ep).into_owned()
    }

    /// The parts of a weight of the expert part, or of its gradient, that the ranks of this
    /// one's block own, in the order of ranks; shards cut it along dimension `cut`, if they
    /// do. What they do not cut, the last bias, the first of them owns alone; of an expert with
    /// replicas the owner's is a part, where those are gathered that are on several groups.
    pub fn regions(&self, tensor: TensorId, cut: Option<usize>) -> Vec<ShardRegion> {
        let shape = &self.experts[tensor].shape;
        let shape: Vec<usize> = shape.iter().map(|size| size.eval(0) as usize).collect();
        let by = self.by();
        let block = by.block(self.mesh.rank(self.place));
        let placement = self.placement();
        let owners = block.clone().map(|rank| (rank - block.start, rank));
        let regions = |(owner, rank): (usize, usize)| {
            let shard = rank % self.mesh.expert_tp % by.width();
            let owns = cut.is_some() || shard == 0;
            let runs = owns.then(|| self.runs(&placement, rank));
            let runs = runs.into_iter().flatten();
            let region = |run| self.region(&shape, cut, (owner, shard), run);
            runs.map(region).collect::<Vec<_>>()
        };
        owners.flat_map(regions).collect()
    }

    /// Experts of a rank of the block that others gather, in a row on both parts: the first
    /// one's number there, here, and how many.
    fn runs(&self, placement: &Placement, rank: usize) -> Vec<[usize; 3]> {
        let ep = rank / self.mesh.expert_tp % self.mesh.ep;
        if self.adaptive_r > 0 {
            // The ranks of a block have the same experts.
            return vec![[0, 0, placement.count(ep)]];
        }
        let experts = placement.of(ep);
        let pairs = experts.iter().copied().enumerate();
        let owned: Vec<(usize, usize)> = pairs
            .filter(|(slot, _)| placement.owns(ep, *slot))
            .collect();
        let next = |a: &(usize, usize), b: &(usize, usize)| (a.0 + 1, a.1 + 1) == *b;
        let runs = owned.chunk_by(next);
        runs.map(|run| [run[0].0, run[0].1, run.len()]).collect()
    }

    fn region(
        &self,
        shape: &[usize],
        cut: Option<usize>,
        (owner, shard): (usize, usize),
        [slot, here, experts]: [usize; 3],
    ) -> ShardRegion {
        let width = self.by().width();
        let (before, behind) = shape.split_at(cut.unwrap_or(1));
        let each = before[1..].iter().product::<usize>();
        let rows = experts * each;
        let stride: usize = behind.iter().product();
        let row = cut.map_or(stride, |_| stride / width);
        let first = here * shape[1..].iter().product::<usize>() + shard * row;
        let region = ShardRegion {
            owner,
            own: slot * each * row,
            first,
            rows,
            row,
            stride,
        };
        if row == stride {
            ShardRegion {
                rows: 1,
                row: rows * row,
                stride: rows * row,
                ..region
            }
        } else {
            region
        }
    }
}

/// The dimension of a weight of experts, by its name, along which shards cut it: the hidden
/// one. `None` for the last bias, which the first shard has.
pub(super) fn cut_of(name: &str) -> Option<usize> {
    match name.rsplit_once("experts.")?.1 {
        "gate.weight" | "up.weight" | "gate.bias" | "up.bias" => Some(1),
        "down.weight" => Some(2),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Sharing, plan_rank};
    use crate::{PlanOptions, Role, Training};
    use moesaic_spec::LayerSpec;

    fn meshes() -> impl Iterator<Item = Parallel> {
        let sizes = [
            (2, 4, 1),
            (1, 8, 1),
            (2, 6, 1),
            (3, 4, 2),
            (5, 1, 1),
            (5, 2, 3),
            (1, 1, 1),
        ];
        sizes.into_iter().map(|(ep, expert_tp, dp)| Parallel {
            ep,
            expert_tp,
            dp,
            ..Parallel::default()
        })
    }

    #[test]
    fn every_rank_has_one_place_at_any_number_of_ways() {
        for mesh in meshes() {
            for adaptive_r in AdaptiveMesh::all(mesh) {
                let by = AdaptiveMesh::new(mesh, adaptive_r).unwrap();
                assert_eq!(by.mesh().ranks(), mesh.ranks());
                for rank in 0..mesh.ranks() {
                    let place = by.place(rank);
                    assert_eq!(by.rank(place), rank, "{mesh:?}, {adaptive_r} adaptive_r");
                    assert!(!by.is_owner_only() || mesh.place(rank) == Ok(place));
                    // Of a block each does the same for other tokens.
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

    /// Brute force: each element of what a rank multiplies with is the owner's of the same
    /// element of the whole.
    #[test]
    fn strips_are_what_owners_have() {
        let text =
            "shape = { model_dim = 3, hidden_dim = 24, experts = 5, top_k = 2, output_dim = 2 }
             experts = { bias = true }";
        let spec = LayerSpec::from_toml(text).unwrap();
        let options = PlanOptions::training(Training::default());
        let target = "cpu:avx2".parse().unwrap();
        let placements = |groups: usize| match groups {
            2 => Some("3,+0,1-2 | 4,0,+2"),
            3 => Some("+1,2-3,+0 | 0 | 4,1,+3"),
            _ => None,
        };
        let parsed = |text: &str| text.parse::<Placement>().unwrap();
        let both = |mesh: Parallel| [None, placements(mesh.ep).map(parsed)].map(|p| (mesh, p));
        for (mesh, placement) in meshes().flat_map(both) {
            for adaptive_r in AdaptiveMesh::all(mesh) {
                let rank = mesh.ranks() * 2 / 3;
                let sharing = Sharing::from(mesh).at_r(adaptive_r);
                let sharing = sharing.placed(placement.as_ref());
                let plan = plan_rank(&spec, target, &options, sharing, rank).unwrap();
                for (at, tensor) in plan.experts.tensors.iter().enumerate() {
                    if matches!(tensor.role, Role::Weight | Role::WeightGradient) {
                        check(&plan, TensorId(at), cut_of(&tensor.name));
                    }
                }
            }
        }
    }

    fn check(plan: &RankPlan, tensor: TensorId, cut: Option<usize>) {
        let (by, mesh) = (plan.by(), plan.mesh);
        let rank = mesh.rank(plan.place);
        let shape = &plan.experts[tensor].shape;
        let mut shape: Vec<usize> = shape.iter().map(|size| size.eval(0) as usize).collect();
        shape.resize(3, 1);
        let hidden = |shard: usize, mesh: Parallel| match cut {
            Some(_) => mesh.hidden(shard, 24),
            None => 0..shape[1],
        };
        let coordinates = |index: usize, shape: &[usize]| {
            let (row, inner) = (shape[1] * shape[2], shape[2]);
            [index / row, index % row / inner, index % inner]
        };
        // The number of an element in the whole tensor, and how a part of it is laid out.
        let whole = |[e, a, b]: [usize; 3], experts: &[usize], first: usize| match cut {
            Some(1) => [experts[e], first + a, b],
            Some(2) => [experts[e], a, first + b],
            _ => [experts[e], a, b],
        };
        let (placement, all) = (plan.placement(), plan.experts_here());
        let here = hidden(by.place(rank).tp, by.mesh()).start;
        let mut covered = vec![0; shape.iter().product()];
        for region in plan.regions(tensor, cut) {
            let owner = mesh.place(by.block(rank).start + region.owner).unwrap();
            let experts = placement.of(owner.ep);
            let mut own = shape.clone();
            own[0] = experts.len();
            if let Some(cut) = cut {
                own[cut] = 24 / mesh.expert_tp;
            }
            let theirs = cut.map_or(0, |_| hidden(owner.tp, mesh).start);
            for index in 0..region.elements() {
                let at = region.first + index / region.row * region.stride + index % region.row;
                covered[at] += 1;
                let from = whole(coordinates(region.own + index, &own), &experts, theirs);
                let first = cut.map_or(0, |_| here);
                let to = whole(coordinates(at, &shape), &all, first);
                assert_eq!(from, to, "{:?} of {by:?}", plan.experts[tensor].name);
            }
        }
        assert!(covered.iter().all(|times| *times == 1), "{by:?}");
    }
}
