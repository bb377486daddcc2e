//! Placement of experts on ranks, as data: any experts on any group, some on several.
//!
//! ```text
//! loads of experts ──eplb, Balancer──> Placement ──moves──> what travels between steps
//! counts of a step ──shadow──────────> experts that every group has for this step
//! ```
//!
//! All functions are pure, so ranks with the same numbers decide alike.

mod balancer;
mod eplb;
mod moves;
mod shadow;
mod text;

pub use balancer::{Balancer, Balancing};
pub use eplb::{Eplb, Replication, balanced, rebalance};
pub use moves::{ExpertSlot, Kept, Move, Moves, moves, moves_from};
pub use shadow::{ShadowForm, ShadowModel, shadows};

use crate::Parallel;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

/// The experts of each group of ranks (`ep` groups). An expert may be on several groups, as
/// replicas; one of these is its owner, which sums the gradients and saves the expert. Cheap to
/// clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct Placement(Form);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Form {
    /// Contiguous ranges, as equal as possible: [`Parallel::experts`].
    Contiguous {
        groups: usize,
        experts: usize,
    },
    Listed(Arc<Lists>),
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Lists {
    /// The experts of each group, in the order in which it holds them.
    groups: Vec<Vec<usize>>,
    /// The groups with each expert, ascending.
    holders: Vec<Vec<usize>>,
    /// The owner among these groups, for each expert.
    owners: Vec<usize>,
    split: Split,
}

/// The rule that splits rows over the replicas of an expert. Each rank decides alone, from its
/// index and its number of rows for the expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    /// A rank's rows for the expert, in the order of its tokens, are split into one part for each
    /// replica, as equal as possible. Part `k` of rank `q` of a group goes to replica `(k + q) mod
    /// r`, so that remainders do not always go to the first replica.
    #[default]
    Even,
    /// All rows stay where the rank's own group has a replica; otherwise all go to replica `q mod
    /// r`.
    Near,
}

/// A rank that has rows for an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowSource {
    /// Its index among the ranks that hold all experts.
    pub rank: usize,
    /// Its own group.
    pub ep: usize,
}

/// The serialized form.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    experts: usize,
    groups: Vec<Vec<usize>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    owners: Option<Vec<usize>>,
    #[serde(default, skip_serializing_if = "is_even")]
    split: Split,
}

fn is_even(split: &Split) -> bool {
    *split == Split::Even
}

/// An invalid placement.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// An expert that no group has.
    #[error("expert {expert} is on no group; each of {experts} experts needs one")]
    Nowhere {
        /// The id.
        expert: usize,
        /// The layer's number.
        experts: usize,
    },
    /// A group without experts.
    #[error("group {group} has no expert; give it one, if only a replica, or take a smaller `ep`")]
    EmptyGroup {
        /// The id.
        group: usize,
    },
    /// The layer has no such expert.
    #[error("group {group} has expert {expert}, the layer has {experts}")]
    Unknown {
        /// The id.
        expert: usize,
        /// The group that names it.
        group: usize,
        /// The layer's number.
        experts: usize,
    },
    /// An expert that a group has twice.
    #[error("group {group} has expert {expert} twice; replicas are on groups of their own")]
    Twice {
        /// The id.
        expert: usize,
        /// The group.
        group: usize,
    },
    /// An owner without its expert.
    #[error("group {group} owns expert {expert} and does not have it; {holders:?} do")]
    NotThere {
        /// The id.
        expert: usize,
        /// The owner.
        group: usize,
        /// The groups that could own it.
        holders: Vec<usize>,
    },
    /// The number of owners differs from the number of experts.
    #[error("{owners} owners of {experts} experts; name one for each, or none at all")]
    Owners {
        /// The number of owners.
        owners: usize,
        /// The layer's number.
        experts: usize,
    },
    /// A placement for other ranks, or of another layer.
    #[error(
        "the placement is of {experts} experts on {groups} groups, the layer has {wanted_experts} \
         on {wanted_groups} (`ep`)"
    )]
    OtherSize {
        /// The placement's number.
        experts: usize,
        /// The placement's number.
        groups: usize,
        /// The layer's number.
        wanted_experts: usize,
        /// The mesh's number.
        wanted_groups: usize,
    },
    /// Experts cannot be packed with these numbers.
    #[error("{0}")]
    Packing(String),
    /// The text is not a placement.
    #[error("{0}")]
    Text(String),
}

impl Placement {
    /// Returns the default placement of a mesh: contiguous ranges.
    pub fn contiguous(groups: usize, experts: usize) -> Placement {
        Placement(Form::Contiguous { groups, experts })
    }

    /// Makes a placement from the experts of each group, in the order in which it holds them.
    /// Without `owners` the first group with an expert owns it.
    ///
    /// # Errors
    /// [`PlacementError`] says which expert or group is wrong.
    pub fn new(
        experts: usize,
        groups: Vec<Vec<usize>>,
        owners: Option<Vec<usize>>,
        split: Split,
    ) -> Result<Placement, PlacementError> {
        let holders = holders(experts, &groups)?;
        let owners = match owners {
            Some(owners) => checked_owners(owners, &holders)?,
            None => holders.iter().map(|groups| groups[0]).collect(),
        };
        let one_each = holders.iter().all(|groups| groups.len() == 1);
        let in_order = groups.iter().flatten().copied().eq(0..experts);
        let equal = Placement::contiguous(groups.len(), experts);
        let sizes = groups.iter().enumerate();
        let mut sizes = sizes.map(|(group, list)| list.len() == equal.range(group).len());
        if one_each && in_order && sizes.all(|same| same) {
            return Ok(equal); // one form for the same, so that they are equal
        }
        Ok(Placement(Form::Listed(Arc::new(Lists {
            groups,
            holders,
            owners,
            split,
        }))))
    }

    /// Returns the number of experts of the layer.
    pub fn experts(&self) -> usize {
        match &self.0 {
            Form::Contiguous { experts, .. } => *experts,
            Form::Listed(lists) => lists.owners.len(),
        }
    }

    /// Returns the number of groups of ranks: `ep` of the mesh.
    pub fn groups(&self) -> usize {
        match &self.0 {
            Form::Contiguous { groups, .. } => *groups,
            Form::Listed(lists) => lists.groups.len(),
        }
    }

    /// Returns the rule that splits rows over replicas.
    pub fn split(&self) -> Split {
        match &self.0 {
            Form::Contiguous { .. } => Split::Even,
            Form::Listed(lists) => lists.split,
        }
    }

    /// Returns whether this is the default placement of a mesh.
    pub fn is_contiguous(&self) -> bool {
        matches!(self.0, Form::Contiguous { .. })
    }

    /// Returns the experts of a group, in the order in which it holds them.
    pub fn of(&self, group: usize) -> Cow<'_, [usize]> {
        match &self.0 {
            Form::Contiguous { .. } => self.range(group).collect(),
            Form::Listed(lists) => Cow::Borrowed(&lists.groups[group]),
        }
    }

    /// Returns the number of experts of a group.
    pub fn count(&self, group: usize) -> usize {
        match &self.0 {
            Form::Contiguous { .. } => self.range(group).len(),
            Form::Listed(lists) => lists.groups[group].len(),
        }
    }

    /// Returns the slot of an expert among a group's experts.
    pub fn slot(&self, group: usize, expert: usize) -> Option<usize> {
        match &self.0 {
            Form::Contiguous { .. } => {
                let own = self.range(group);
                own.contains(&expert).then(|| expert - own.start)
            }
            Form::Listed(lists) => lists.groups[group].iter().position(|e| *e == expert),
        }
    }

    /// Returns the group that owns an expert.
    pub fn owner(&self, expert: usize) -> usize {
        match &self.0 {
            Form::Contiguous { groups, experts } => owner_of(*groups, *experts, expert),
            Form::Listed(lists) => lists.owners[expert],
        }
    }

    /// Returns the groups with an expert, ascending.
    pub fn holders(&self, expert: usize) -> Cow<'_, [usize]> {
        match &self.0 {
            Form::Contiguous { .. } => Cow::Owned(vec![self.owner(expert)]),
            Form::Listed(lists) => Cow::Borrowed(&lists.holders[expert]),
        }
    }

    /// Returns the experts with replicas.
    pub fn replicated(&self) -> Vec<usize> {
        match &self.0 {
            Form::Contiguous { .. } => Vec::new(),
            Form::Listed(lists) => {
                let all = 0..lists.holders.len();
                all.filter(|&expert| lists.holders[expert].len() > 1)
                    .collect()
            }
        }
    }

    /// Returns whether a group owns the expert in one of its slots.
    pub fn owns(&self, group: usize, slot: usize) -> bool {
        match &self.0 {
            Form::Contiguous { .. } => true,
            Form::Listed(lists) => lists.owners[lists.groups[group][slot]] == group,
        }
    }

    /// Returns the range of a rank's `rows` for an expert that goes to a group.
    #[doc(hidden)]
    pub fn share(
        &self,
        source: RowSource,
        expert: usize,
        rows: usize,
        group: usize,
    ) -> Range<usize> {
        let Form::Listed(lists) = &self.0 else {
            return 0..if self.owner(expert) == group { rows } else { 0 };
        };
        let holders = &lists.holders[expert];
        let all = holders.len();
        // Searched for on every rank in each call, so holders are sorted once, when the placement
        // is made.
        let Ok(replica) = holders.binary_search(&group) else {
            return 0..0;
        };
        match lists.split {
            _ if all == 1 => 0..rows,
            Split::Even => {
                // The inverse of the rule of [`Split::Even`]; `all` is added first because the
                // numbers are unsigned.
                let part = (replica + all - source.rank % all) % all;
                even(rows, all, part)
            }
            Split::Near if nearest(holders, source) == replica => 0..rows,
            Split::Near => 0..0,
        }
    }

    /// Returns the fraction of a rank's rows for an expert that goes to a group, in the limit of
    /// many rows: [`Placement::share`].
    #[doc(hidden)]
    pub fn part(&self, source: RowSource, expert: usize, group: usize) -> f64 {
        let Form::Listed(lists) = &self.0 else {
            return f64::from(u8::from(self.owner(expert) == group));
        };
        let holders = &lists.holders[expert];
        match (holders.binary_search(&group), lists.split) {
            (Err(_), _) => 0.0,
            (Ok(_), Split::Even) => 1.0 / holders.len() as f64,
            (Ok(replica), Split::Near) => f64::from(u8::from(nearest(holders, source) == replica)),
        }
    }

    /// Returns whether ranks with the same rows send the same parts of them to the same groups.
    pub fn is_for_all(&self) -> bool {
        self.split() == Split::Even || self.replicated().is_empty()
    }

    /// Returns the rows that each group gets, from the rows of each rank of a group of ranks for
    /// each expert: the sum of [`Placement::share`]. `expert_tp` is the mesh's: that many
    /// consecutive ranks are one group.
    pub fn received(&self, expert_tp: usize, counts: &[Vec<usize>]) -> Vec<usize> {
        let mut rows = vec![0; self.groups()];
        for (source, counts) in counts.iter().enumerate() {
            let from = RowSource {
                rank: source,
                ep: source / expert_tp.max(1),
            };
            for (expert, &count) in counts.iter().enumerate() {
                for &group in &*self.holders(expert) {
                    rows[group] += self.share(from, expert, count, group).len();
                }
            }
        }
        rows
    }

    /// Returns the load of each group when replicas share every expert's load evenly.
    pub fn loads(&self, loads: &[f64]) -> Vec<f64> {
        let mut sums = vec![0.0; self.groups()];
        for (expert, load) in loads.iter().enumerate() {
            let holders = self.holders(expert);
            for &group in &*holders {
                sums[group] += load / holders.len() as f64;
            }
        }
        sums
    }

    /// Returns the load of the busiest group: [`Placement::loads`].
    pub fn busiest(&self, loads: &[f64]) -> f64 {
        self.loads(loads).into_iter().fold(0.0, f64::max)
    }

    /// Returns the placement of one step with shadows: every group also holds these experts, after
    /// its own ones and in ascending order. Their rows stay where they are ([`Split::Near`]).
    ///
    /// # Errors
    /// [`PlacementError::Unknown`].
    pub fn with_shadows(&self, shadows: &[usize]) -> Result<Placement, PlacementError> {
        let (experts, mut added) = (self.experts(), shadows.to_vec());
        added.sort_unstable();
        added.dedup();
        let of = |group: usize| {
            let mut list = self.of(group).into_owned();
            let new = added.iter().filter(|e| self.slot(group, **e).is_none());
            list.extend(new);
            list
        };
        let groups = (0..self.groups()).map(of).collect();
        let owners = (0..experts).map(|expert| self.owner(expert)).collect();
        // The owners stay: they sum the gradients of a shadow and keep its weights after the step.
        Placement::new(experts, groups, Some(owners), Split::Near)
    }

    /// Returns the same placement with another rule of splitting rows.
    pub fn splitting(&self, split: Split) -> Placement {
        match &self.0 {
            Form::Contiguous { .. } => self.clone(),
            Form::Listed(lists) => Placement(Form::Listed(Arc::new(Lists {
                groups: lists.groups.clone(),
                holders: lists.holders.clone(),
                owners: lists.owners.clone(),
                split,
            }))),
        }
    }

    /// Checks that a mesh can hold this placement of a layer with `experts` experts.
    ///
    /// # Errors
    /// [`PlacementError::OtherSize`].
    pub fn check(&self, mesh: &Parallel, experts: usize) -> Result<(), PlacementError> {
        match (self.experts(), self.groups()) {
            (own, groups) if own == experts && groups == mesh.ep => Ok(()),
            (own, groups) => Err(PlacementError::OtherSize {
                experts: own,
                groups,
                wanted_experts: experts,
                wanted_groups: mesh.ep,
            }),
        }
    }

    /// Returns the experts of a group in the contiguous form.
    fn range(&self, group: usize) -> Range<usize> {
        let mesh = Parallel {
            ep: self.groups(),
            ..Parallel::default()
        };
        mesh.experts(group, self.experts())
    }
}

/// Returns the replica that gets all rows of a rank with [`Split::Near`].
fn nearest(holders: &[usize], source: RowSource) -> usize {
    let own = holders.binary_search(&source.ep);
    own.unwrap_or(source.rank % holders.len())
}

/// Returns part `part` of `parts` of some rows; the first parts get one more where the division
/// leaves a remainder.
fn even(rows: usize, parts: usize, part: usize) -> Range<usize> {
    let mesh = Parallel {
        ep: parts,
        ..Parallel::default()
    };
    mesh.experts(part, rows)
}

/// Returns the group of an expert: the inverse of [`Parallel::experts`].
fn owner_of(groups: usize, experts: usize, expert: usize) -> usize {
    let (each, more) = (experts / groups, experts % groups);
    if expert < more * (each + 1) {
        expert / (each + 1)
    } else {
        // With fewer experts than groups `each` is 0, and every expert is in the branch above.
        more + (expert - more * (each + 1)) / each.max(1)
    }
}

fn holders(experts: usize, groups: &[Vec<usize>]) -> Result<Vec<Vec<usize>>, PlacementError> {
    let mut holders: Vec<Vec<usize>> = vec![Vec::new(); experts];
    for (group, list) in groups.iter().enumerate() {
        if list.is_empty() {
            return Err(PlacementError::EmptyGroup { group });
        }
        for &expert in list {
            let unknown = PlacementError::Unknown {
                expert,
                group,
                experts,
            };
            let holders = holders.get_mut(expert).ok_or(unknown)?;
            // Groups are visited in order, so a second mention in one group directly follows the
            // first.
            if holders.last() == Some(&group) {
                return Err(PlacementError::Twice { expert, group });
            }
            holders.push(group);
        }
    }
    match holders.iter().position(Vec::is_empty) {
        None => Ok(holders),
        Some(expert) => Err(PlacementError::Nowhere { expert, experts }),
    }
}

fn checked_owners(
    owners: Vec<usize>,
    holders: &[Vec<usize>],
) -> Result<Vec<usize>, PlacementError> {
    let (named, experts) = (owners.len(), holders.len());
    if named != experts {
        let owners = named;
        return Err(PlacementError::Owners { owners, experts });
    }
    let has_it = |(expert, group): (usize, &usize)| holders[expert].contains(group);
    match owners.iter().enumerate().find(|pair| !has_it(*pair)) {
        None => Ok(owners),
        Some((expert, &group)) => Err(PlacementError::NotThere {
            expert,
            group,
            holders: holders[expert].clone(),
        }),
    }
}

#[doc(hidden)]
impl TryFrom<Written> for Placement {
    type Error = PlacementError;

    fn try_from(written: Written) -> Result<Placement, PlacementError> {
        let Written {
            experts,
            groups,
            owners,
            split,
        } = written;
        Placement::new(experts, groups, owners, split)
    }
}

impl From<Placement> for Written {
    fn from(placement: Placement) -> Written {
        let all = 0..placement.experts();
        let first = |expert: usize| placement.owner(expert) == placement.holders(expert)[0];
        let named = !all.clone().all(first);
        Written {
            experts: placement.experts(),
            groups: (0..placement.groups())
                .map(|group| placement.of(group).into_owned())
                .collect(),
            owners: named.then(|| all.map(|expert| placement.owner(expert)).collect()),
            split: placement.split(),
        }
    }
}

#[cfg(test)]
mod tests;
