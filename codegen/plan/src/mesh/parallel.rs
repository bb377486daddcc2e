//! How the ranks of a job share a layer.

use moesaic_spec::LayerSpec;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// How ranks share a layer: `dp` groups that each hold all experts once, in each of them
/// `ep` groups with some of the experts, and of each expert `shards` slices along its
/// hidden width. Tokens are everybody's own.
///
/// A rank's number is `(dp * EP + ep) * SHARDS + shard`, so that the slices of an expert
/// are next to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parallel {
    /// Groups of ranks that share the experts.
    pub ep: usize,
    /// Slices of an expert.
    pub shards: usize,
    /// Groups that hold all experts.
    pub dp: usize,
}

impl Default for Parallel {
    /// One rank.
    fn default() -> Self {
        Parallel {
            ep: 1,
            shards: 1,
            dp: 1,
        }
    }
}

/// Where a rank is in a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Place {
    /// Which group that holds all experts.
    pub dp: usize,
    /// Which of the groups that share the experts.
    pub ep: usize,
    /// Which slice of them.
    pub shard: usize,
}

/// A mesh that a layer cannot have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// A number of groups is zero, or their product overflows.
    #[error("a mesh of ep = {ep}, shards = {shards}, dp = {dp} has no ranks; each is at least 1")]
    Empty {
        /// As asked for.
        ep: usize,
        /// As asked for.
        shards: usize,
        /// As asked for.
        dp: usize,
    },
    /// A group would have no expert.
    #[error(
        "{ep} groups cannot share {experts} experts: at most {experts}\n\
         with more ranks, cut experts into slices (`shards`) or repeat them (`dp`)"
    )]
    TooManyGroups {
        /// As asked for.
        ep: usize,
        /// Of the layer.
        experts: usize,
    },
    /// Slices would not be equal.
    #[error("{shards} slices of hidden_dim = {hidden} are not equal; take a divisor of it")]
    Uneven {
        /// As asked for.
        shards: usize,
        /// Of the layer.
        hidden: usize,
    },
    /// A rank that the mesh has not.
    #[error("rank {rank} is not in a mesh of {ranks} ranks")]
    NoRank {
        /// As asked for.
        rank: usize,
        /// Of the mesh.
        ranks: usize,
    },
    /// A job of another size.
    #[error("the mesh is for {wanted} ranks (ep {} x shards {} x dp {}), there are {ranks}", mesh.ep, mesh.shards, mesh.dp)]
    OtherSize {
        /// The mesh.
        mesh: Parallel,
        /// Its ranks.
        wanted: usize,
        /// Those there are.
        ranks: usize,
    },
}

impl Parallel {
    /// The mesh that `ranks` ranks have where nothing else is said: as many groups share
    /// the experts as can, then experts are sliced, then repeated.
    pub fn of(ranks: usize, spec: &LayerSpec) -> Parallel {
        let largest = |of: usize, fits: &dyn Fn(usize) -> bool| {
            let divisors = (1..=of).rev().filter(|n| of.is_multiple_of(*n));
            divisors.into_iter().find(|n| fits(*n)).unwrap_or(1)
        };
        let ranks = ranks.max(1);
        let ep = largest(ranks, &|n| n <= spec.shape.experts);
        let rest = ranks / ep;
        let shards = largest(rest, &|n| spec.shape.hidden_dim.is_multiple_of(n));
        Parallel {
            ep,
            shards,
            dp: rest / shards,
        }
    }

    /// All ranks.
    pub fn ranks(&self) -> usize {
        self.ep * self.shards * self.dp
    }

    /// Ranks of a group that holds all experts once: those between which rows are
    /// exchanged.
    pub fn group(&self) -> usize {
        self.ep * self.shards
    }

    /// Whether a layer can be shared so.
    ///
    /// # Errors
    /// [`MeshError`] says what is possible.
    pub fn check(&self, spec: &LayerSpec) -> Result<(), MeshError> {
        let Parallel { ep, shards, dp } = *self;
        let product = ep.checked_mul(shards).and_then(|n| n.checked_mul(dp));
        let (experts, hidden) = (spec.shape.experts, spec.shape.hidden_dim);
        match product {
            None | Some(0) => Err(MeshError::Empty { ep, shards, dp }),
            _ if ep > experts => Err(MeshError::TooManyGroups { ep, experts }),
            _ if !hidden.is_multiple_of(shards) => Err(MeshError::Uneven { shards, hidden }),
            _ => Ok(()),
        }
    }

    /// Where a rank is.
    ///
    /// # Errors
    /// [`MeshError::NoRank`].
    pub fn place(&self, rank: usize) -> Result<Place, MeshError> {
        let ranks = self.ranks();
        if rank >= ranks {
            return Err(MeshError::NoRank { rank, ranks });
        }
        Ok(Place {
            dp: rank / self.group(),
            ep: rank % self.group() / self.shards,
            shard: rank % self.shards,
        })
    }

    /// The rank at a place.
    pub fn rank(&self, place: Place) -> usize {
        (place.dp * self.ep + place.ep) * self.shards + place.shard
    }

    /// The experts of a group: as equally many as can be, the first groups one more.
    pub fn experts(&self, ep: usize, experts: usize) -> Range<usize> {
        let (each, more) = (experts / self.ep, experts % self.ep);
        let first = ep * each + ep.min(more);
        first..first + each + usize::from(ep < more)
    }

    /// The hidden units of a slice.
    pub fn hidden(&self, shard: usize, hidden: usize) -> Range<usize> {
        let each = hidden / self.shards;
        shard * each..(shard + 1) * each
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moesaic_spec::testing::sample;

    #[test]
    fn every_rank_has_one_place() {
        for (ep, shards, dp) in [(1, 1, 1), (4, 1, 1), (3, 2, 1), (2, 3, 2), (1, 1, 5)] {
            let mesh = Parallel { ep, shards, dp };
            for rank in 0..mesh.ranks() {
                assert_eq!(mesh.rank(mesh.place(rank).unwrap()), rank);
            }
            let (rank, ranks) = (mesh.ranks(), mesh.ranks());
            assert_eq!(mesh.place(rank), Err(MeshError::NoRank { rank, ranks }));
        }
    }

    #[test]
    fn every_expert_and_unit_has_one_owner() {
        for experts in [1, 2, 5, 8, 33] {
            for ep in 1..=experts {
                let mesh = Parallel {
                    ep,
                    ..Parallel::default()
                };
                let all: Vec<usize> = (0..ep).flat_map(|at| mesh.experts(at, experts)).collect();
                assert!(all.into_iter().eq(0..experts), "{experts} over {ep}");
                assert!((0..ep).all(|at| !mesh.experts(at, experts).is_empty()));
            }
        }
        let mesh = Parallel {
            shards: 3,
            ..Parallel::default()
        };
        let all = (0..3).flat_map(|shard| mesh.hidden(shard, 12));
        assert!(all.eq(0..12));
    }

    #[test]
    fn a_mesh_is_found_for_any_number_of_ranks() {
        let spec = sample(1);
        for ranks in 1..=64 {
            let mesh = Parallel::of(ranks, &spec);
            assert_eq!(mesh.ranks(), ranks, "{mesh:?}");
            mesh.check(&spec).unwrap();
        }
    }

    #[test]
    fn what_cannot_be_says_what_can() {
        let spec = sample(1);
        let check = |ep, shards, dp| Parallel { ep, shards, dp }.check(&spec).unwrap_err();
        let experts = spec.shape.experts;
        let error = check(experts + 1, 1, 1).to_string();
        assert!(error.contains(&format!("at most {experts}")), "{error}");
        assert!(matches!(check(0, 1, 1), MeshError::Empty { .. }));
        assert!(matches!(check(1, usize::MAX, 2), MeshError::Empty { .. }));
        let hidden = spec.shape.hidden_dim;
        assert!(matches!(check(1, hidden + 1, 1), MeshError::Uneven { .. }));
    }
}
