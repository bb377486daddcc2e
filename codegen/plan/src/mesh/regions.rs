//! The parts of weights that ranks gather from each other at an adaptive parallelism degree
//! ([`AdaptiveMesh`]).

use super::RankPlan;
use crate::TensorId;
use moesaic_dist::{AdaptiveMesh, Placement};

/// The region that one owner contributes to a tensor of the expert part: `rows` rows of `row`
/// elements, `stride` elements from one row to the next. The owner stores the region without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardRegion {
    /// The owner's index in the block.
    pub owner: usize,
    /// The first element of the region in the owner's own tensor.
    pub own: usize,
    /// The first element of the region in the gathered tensor.
    pub first: usize,
    /// The number of rows.
    pub rows: usize,
    /// Elements of one row.
    pub row: usize,
    /// Elements from the start of one row to the start of the next.
    pub stride: usize,
}

impl ShardRegion {
    /// Returns the number of elements in the region.
    pub fn elements(&self) -> usize {
        self.rows * self.row
    }
}

impl RankPlan {
    /// Returns the mesh and degree by which rows are exchanged.
    pub fn by(&self) -> AdaptiveMesh {
        AdaptiveMesh::planned(self.mesh, self.adaptive_r)
    }

    /// Returns the placement of experts on the mesh in which rows are exchanged. Where rows stay,
    /// every group has all experts in order.
    pub fn row_placement(&self) -> Placement {
        match self.adaptive_r {
            0 => Placement::contiguous(1, self.tokens.spec.shape.experts),
            _ => self.placement(),
        }
    }

    /// Returns the experts that this rank multiplies with: its own, or those of all ranks.
    pub fn experts_here(&self) -> Vec<usize> {
        let place = self.by().place(self.mesh.rank(self.place));
        self.row_placement().of(place.ep).into_owned()
    }

    /// Returns the regions of a weight of the expert part, or of its gradient, that the ranks of
    /// this rank's block own, in the order of ranks. `dim` is the dimension that shards split.
    /// Where `dim` is `None` (the last bias) the first owner holds the whole tensor. Where the
    /// block spans several groups and an expert has replicas, only the region of the expert's owner
    /// is listed.
    pub fn regions(&self, tensor: TensorId, dim: Option<usize>) -> Vec<ShardRegion> {
        let shape = &self.experts[tensor].shape;
        let shape: Vec<usize> = shape.iter().map(|size| size.eval(0) as usize).collect();
        let by = self.by();
        let block = by.block(self.mesh.rank(self.place));
        let placement = self.placement();
        let owners = block.clone().map(|rank| (rank - block.start, rank));
        let regions = |(owner, rank): (usize, usize)| {
            // A shard to multiply with consists of `width` stored ones, those of adjacent ranks.
            let shard = rank % self.mesh.expert_tp % by.width();
            // A tensor that shards do not split (the last bias) is gathered from one owner alone: the
            // other shards hold zeros.
            let owns = dim.is_some() || shard == 0;
            let runs = owns.then(|| self.runs(&placement, rank));
            let runs = runs.into_iter().flatten();
            let region = |run| self.region(&shape, dim, (owner, shard), run);
            runs.map(region).collect::<Vec<_>>()
        };
        owners.flat_map(regions).collect()
    }

    /// Returns the consecutive experts of a rank of the block that other ranks gather.
    fn runs(&self, placement: &Placement, rank: usize) -> Vec<[usize; 3]> {
        let ep = rank / self.mesh.expert_tp % self.mesh.ep;
        if self.adaptive_r > 0 {
            // All ranks of a block hold the same experts, so one run has all of them.
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
        dim: Option<usize>,
        (owner, shard): (usize, usize),
        [slot, here, experts]: [usize; 3],
    ) -> ShardRegion {
        let width = self.by().width();
        let (before, behind) = shape.split_at(dim.unwrap_or(1));
        let each = before[1..].iter().product::<usize>();
        let rows = experts * each;
        let stride: usize = behind.iter().product();
        let row = dim.map_or(stride, |_| stride / width);
        let first = here * shape[1..].iter().product::<usize>() + shard * row;
        let region = ShardRegion {
            owner,
            own: slot * each * row,
            first,
            rows,
            row,
            stride,
        };
        // Whole rows are contiguous in the gathered tensor, too, so they are one long row: one
        // message and one copy instead of one for each row.
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

/// Returns the dimension that shards split, by the name of an expert's weight: the hidden
/// dimension. `None` for the last bias, which the first shard holds alone.
pub(super) fn shard_dim(name: &str) -> Option<usize> {
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
    use crate::{PlanOptions, TensorRole, Training};
    use moesaic_dist::Parallel;
    use moesaic_dist::testing::meshes;
    use moesaic_spec::LayerSpec;

    /// Checks element by element: each element that a rank multiplies with is its owner's copy of
    /// the same element of the whole tensor.
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
                    if matches!(tensor.role, TensorRole::Weight | TensorRole::WeightGradient) {
                        check(&plan, TensorId(at), shard_dim(&tensor.name));
                    }
                }
            }
        }
    }

    fn check(plan: &RankPlan, tensor: TensorId, dim: Option<usize>) {
        let (by, mesh) = (plan.by(), plan.mesh);
        let rank = mesh.rank(plan.place);
        let shape = &plan.experts[tensor].shape;
        let mut shape: Vec<usize> = shape.iter().map(|size| size.eval(0) as usize).collect();
        shape.resize(3, 1);
        let hidden = |shard: usize, mesh: Parallel| match dim {
            Some(_) => mesh.hidden(shard, 24),
            None => 0..shape[1],
        };
        let coordinates = |index: usize, shape: &[usize]| {
            let (row, inner) = (shape[1] * shape[2], shape[2]);
            [index / row, index % row / inner, index % inner]
        };
        // Returns the index of an element in the whole tensor, given how a part of it is laid out.
        let whole = |[e, a, b]: [usize; 3], experts: &[usize], first: usize| match dim {
            Some(1) => [experts[e], first + a, b],
            Some(2) => [experts[e], a, first + b],
            _ => [experts[e], a, b],
        };
        let (placement, all) = (plan.placement(), plan.experts_here());
        let here = hidden(by.place(rank).tp, by.mesh()).start;
        let mut covered = vec![0; shape.iter().product()];
        for region in plan.regions(tensor, dim) {
            let owner = mesh.place(by.block(rank).start + region.owner).unwrap();
            let experts = placement.of(owner.ep);
            let mut own = shape.clone();
            own[0] = experts.len();
            if let Some(dim) = dim {
                own[dim] = 24 / mesh.expert_tp;
            }
            let theirs = dim.map_or(0, |_| hidden(owner.tp, mesh).start);
            for index in 0..region.elements() {
                let at = region.first + index / region.row * region.stride + index % region.row;
                covered[at] += 1;
                let from = whole(coordinates(region.own + index, &own), &experts, theirs);
                let first = dim.map_or(0, |_| here);
                let to = whole(coordinates(at, &shape), &all, first);
                assert_eq!(from, to, "{:?} of {by:?}", plan.experts[tensor].name);
            }
        }
        assert!(covered.iter().all(|times| *times == 1), "{by:?}");
    }
}
