//! The mesh: how the ranks of a job share a layer.

use moesaic_spec::{LayerSpec, WeightFormat};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A mesh of ranks: `dp` groups that each hold all experts once; in each of them `ep` groups with
/// some of the experts; and of each expert `expert_tp` shards along its hidden width. Every rank
/// has tokens of its own.
///
/// A rank's number is `(dp * EP + ep) * EXPERT_TP + tp`, so the shards of an expert are on
/// consecutive ranks.
///
/// Shared experts are whole on every rank or sharded like the routed ones ([`SharedExperts`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parallel {
    /// The number of groups that share the experts.
    pub ep: usize,
    /// The number of tensor-parallel shards of an expert.
    pub expert_tp: usize,
    /// The number of groups that hold all experts.
    pub dp: usize,
    /// The part of shared experts that each rank holds.
    #[serde(skip_serializing_if = "SharedExperts::are_whole")]
    pub shared: SharedExperts,
}

impl Default for Parallel {
    /// One rank.
    fn default() -> Self {
        Parallel {
            ep: 1,
            expert_tp: 1,
            dp: 1,
            shared: SharedExperts::Whole,
        }
    }
}

/// The part of shared experts that each rank holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SharedExperts {
    /// Whole shared experts; each rank runs them for its own tokens.
    #[default]
    Whole,
    /// `expert_tp` shards of each along its hidden width; TP peers run them together, for the
    /// tokens of all of them. With one shard this equals [`SharedExperts::Whole`].
    Sharded,
}

impl SharedExperts {
    fn are_whole(&self) -> bool {
        *self == SharedExperts::Whole
    }
}

/// The coordinates of a rank in a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RankCoords {
    /// The index of the group that holds all experts.
    pub dp: usize,
    /// The index among the groups that share the experts.
    pub ep: usize,
    /// The index of the expert tensor-parallel shard.
    pub tp: usize,
}

/// A mesh that a layer cannot have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// A number of groups is zero, or their product overflows.
    #[error(
        "a mesh of ep = {ep}, expert_tp = {expert_tp}, dp = {dp} has no ranks; each is at least 1"
    )]
    Empty {
        /// The number that was asked for.
        ep: usize,
        /// The number that was asked for.
        expert_tp: usize,
        /// The number that was asked for.
        dp: usize,
    },
    /// A group would have no expert.
    #[error(
        "{ep} groups cannot share {experts} experts: at most {experts}\n\
         with more ranks, cut experts into shards (`expert_tp`) or repeat them (`dp`)"
    )]
    TooManyGroups {
        /// The number that was asked for.
        ep: usize,
        /// The layer's number.
        experts: usize,
    },
    /// Shards would not be equal.
    #[error("{expert_tp} shards of hidden_dim = {hidden} are not equal; take a divisor of it")]
    Uneven {
        /// The number that was asked for.
        expert_tp: usize,
        /// The layer's number.
        hidden: usize,
    },
    /// Shards of a shared expert would not be equal.
    #[error(
        "{expert_tp} shards of hidden_dim = {hidden} of shared expert {index} are not equal; take \
         a divisor of it, or leave shared experts whole"
    )]
    UnevenShared {
        /// The number that was asked for.
        expert_tp: usize,
        /// The index of the shared expert.
        index: usize,
        /// Its hidden width.
        hidden: usize,
    },
    /// Experts of codes that would be cut.
    #[error(
        "`precision.experts` = {format} and expert_tp = {expert_tp} do not go together: codes of \
         an expert stay on one rank\nshare experts by `ep` alone, or leave the key out"
    )]
    Codes {
        /// The format.
        format: WeightFormat,
        /// The number of shards that was asked for.
        expert_tp: usize,
    },
    /// The mesh has no such rank.
    #[error("rank {rank} is not in a mesh of {ranks} ranks")]
    NoRank {
        /// The number that was asked for.
        rank: usize,
        /// The mesh's number.
        ranks: usize,
    },
    /// The job has another number of ranks than the mesh.
    #[error("the mesh is for {wanted} ranks (ep {} x expert_tp {} x dp {}), there are {ranks}", mesh.ep, mesh.expert_tp, mesh.dp)]
    OtherSize {
        /// The mesh.
        mesh: Parallel,
        /// The ranks of the mesh.
        wanted: usize,
        /// The ranks of the job.
        ranks: usize,
    },
}

impl Parallel {
    /// Returns the default mesh of `ranks` ranks: as many groups share the experts as possible,
    /// then experts are sharded, then replicated.
    pub fn of(ranks: usize, spec: &LayerSpec) -> Parallel {
        let largest = |of: usize, fits: &dyn Fn(usize) -> bool| {
            let divisors = (1..=of).rev().filter(|n| of.is_multiple_of(*n));
            divisors.into_iter().find(|n| fits(*n)).unwrap_or(1)
        };
        let ranks = ranks.max(1);
        // Whole experts before shards: a row goes to every shard of its expert, so shards multiply
        // what is sent.
        let ep = largest(ranks, &|n| n <= spec.shape.experts);
        let rest = ranks / ep;
        let expert_tp = largest(rest, &|n| spec.shape.hidden_dim.is_multiple_of(n));
        Parallel {
            ep,
            expert_tp,
            dp: rest / expert_tp,
            ..Parallel::default()
        }
    }

    /// Returns the number of ranks; `usize::MAX` if the product overflows, which is no job's
    /// number, so that the check reports it.
    pub fn ranks(&self) -> usize {
        self.group().saturating_mul(self.dp)
    }

    /// Returns the number of ranks in a group that holds all experts once; these exchange rows.
    pub fn group(&self) -> usize {
        self.ep.saturating_mul(self.expert_tp)
    }

    /// Returns whether each rank holds only a shard of each shared expert.
    pub fn shards_shared(&self) -> bool {
        self.shared == SharedExperts::Sharded && self.expert_tp > 1
    }

    /// Checks that a layer can be shared on this mesh.
    ///
    /// # Errors
    /// [`MeshError`] says what is possible.
    pub fn check(&self, spec: &LayerSpec) -> Result<(), MeshError> {
        let Parallel {
            ep, expert_tp, dp, ..
        } = *self;
        let (experts, hidden) = (spec.shape.experts, spec.shape.hidden_dim);
        match self.ranks() {
            0 => Err(MeshError::Empty { ep, expert_tp, dp }),
            _ if ep > experts => Err(MeshError::TooManyGroups { ep, experts }),
            _ if !hidden.is_multiple_of(expert_tp) => Err(MeshError::Uneven { expert_tp, hidden }),
            _ => self.check_shared(spec),
        }
    }

    fn check_shared(&self, spec: &LayerSpec) -> Result<(), MeshError> {
        let expert_tp = self.expert_tp;
        let widths = spec.shared.iter().map(|shared| shared.hidden_dim);
        let mut numbered = widths.enumerate();
        let uneven = numbered.find(|(_, hidden)| !hidden.is_multiple_of(expert_tp));
        match uneven.filter(|_| self.shards_shared()) {
            None => Ok(()),
            Some((index, hidden)) => Err(MeshError::UnevenShared {
                expert_tp,
                index,
                hidden,
            }),
        }
    }

    /// Returns the coordinates of a rank.
    ///
    /// # Errors
    /// [`MeshError::NoRank`].
    pub fn place(&self, rank: usize) -> Result<RankCoords, MeshError> {
        let ranks = self.ranks();
        if rank >= ranks {
            return Err(MeshError::NoRank { rank, ranks });
        }
        Ok(RankCoords {
            dp: rank / self.group(),
            ep: rank % self.group() / self.expert_tp,
            tp: rank % self.expert_tp,
        })
    }

    /// Returns the rank at some coordinates.
    pub fn rank(&self, place: RankCoords) -> usize {
        (place.dp * self.ep + place.ep) * self.expert_tp + place.tp
    }

    /// Returns the experts of a group. Groups get equally many, the first ones one more where the
    /// division leaves a remainder.
    pub fn experts(&self, ep: usize, experts: usize) -> Range<usize> {
        let (each, more) = (experts / self.ep, experts % self.ep);
        let first = ep * each + ep.min(more);
        first..first + each + usize::from(ep < more)
    }

    /// Returns the hidden units of a shard.
    pub fn hidden(&self, tp: usize, hidden: usize) -> Range<usize> {
        let each = hidden / self.expert_tp;
        tp * each..(tp + 1) * each
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moesaic_spec::testing::sample;

    #[test]
    fn every_rank_has_one_place() {
        for (ep, expert_tp, dp) in [(1, 1, 1), (4, 1, 1), (3, 2, 1), (2, 3, 2), (1, 1, 5)] {
            let mesh = Parallel {
                ep,
                expert_tp,
                dp,
                ..Parallel::default()
            };
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
            expert_tp: 3,
            ..Parallel::default()
        };
        let all = (0..3).flat_map(|tp| mesh.hidden(tp, 12));
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
        let mesh = |ep, expert_tp, dp| Parallel {
            ep,
            expert_tp,
            dp,
            ..Parallel::default()
        };
        let check = |ep, expert_tp, dp| mesh(ep, expert_tp, dp).check(&spec).unwrap_err();
        let experts = spec.shape.experts;
        let error = check(experts + 1, 1, 1).to_string();
        assert!(error.contains(&format!("at most {experts}")), "{error}");
        assert!(matches!(check(0, 1, 1), MeshError::Empty { .. }));
        let hidden = spec.shape.hidden_dim;
        for shards in [hidden + 1, usize::MAX] {
            assert!(matches!(check(1, shards, 2), MeshError::Uneven { .. }));
        }
        assert_eq!(mesh(1, usize::MAX, 2).ranks(), usize::MAX);
    }

    #[test]
    fn shards_of_shared_experts_are_equal() {
        let text = "shape = { model_dim = 8, hidden_dim = 12, experts = 4, top_k = 2 }
             shared = [{ hidden_dim = 6 }, { hidden_dim = 8 }]";
        let spec = LayerSpec::from_toml(text).unwrap();
        let mesh = |expert_tp, shared| Parallel {
            expert_tp,
            shared,
            ..Parallel::default()
        };
        for expert_tp in [1, 2, 3] {
            mesh(expert_tp, SharedExperts::Whole).check(&spec).unwrap();
        }
        for expert_tp in [1, 2] {
            mesh(expert_tp, SharedExperts::Sharded)
                .check(&spec)
                .unwrap();
        }
        let three = mesh(3, SharedExperts::Sharded);
        let error = three.check(&spec).unwrap_err();
        let expected = MeshError::UnevenShared {
            expert_tp: 3,
            index: 1,
            hidden: 8,
        };
        assert_eq!(error, expected);
        assert!(three.shards_shared() && !mesh(1, SharedExperts::Sharded).shards_shared());
    }
}
