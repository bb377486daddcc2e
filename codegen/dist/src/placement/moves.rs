//! Moves of experts: the transfers from one placement to another.

use super::{Placement, PlacementError};

/// A place of an expert: a group, and the slot there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertSlot {
    /// The group.
    pub group: usize,
    /// The slot.
    pub slot: usize,
}

/// An expert that moves from group to group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Move {
    /// The expert.
    pub expert: usize,
    /// Its present place.
    pub from: ExpertSlot,
    /// Its new place.
    pub to: ExpertSlot,
}

/// An expert that a group holds before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kept {
    /// The group.
    pub group: usize,
    /// The slot before.
    pub from: usize,
    /// The slot after.
    pub to: usize,
}

/// All moves between two placements.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// The moves, ordered by receiving group and slot.
    pub moves: Vec<Move>,
    /// The experts that stay.
    pub kept: Vec<Kept>,
    /// The place of each expert that no group holds.
    pub missing: Vec<ExpertSlot>,
}

impl Moves {
    /// Returns the moves that a group sends.
    pub fn sent(&self, group: usize) -> impl Iterator<Item = &Move> {
        self.moves.iter().filter(move |one| one.from.group == group)
    }

    /// Returns the moves that a group receives.
    pub fn got(&self, group: usize) -> impl Iterator<Item = &Move> {
        self.moves.iter().filter(move |one| one.to.group == group)
    }
}

/// Returns the moves from one placement to another on the same groups. Nothing is missing.
///
/// # Errors
/// [`PlacementError::OtherSize`].
pub fn moves(from: &Placement, to: &Placement) -> Result<Moves, PlacementError> {
    let (experts, groups) = (from.experts(), from.groups());
    if (experts, groups) != (to.experts(), to.groups()) {
        return Err(PlacementError::OtherSize {
            experts: to.experts(),
            groups: to.groups(),
            wanted_experts: experts,
            wanted_groups: groups,
        });
    }
    let held: Vec<Vec<usize>> = (0..groups).map(|at| from.of(at).into_owned()).collect();
    Ok(moves_from(&held, to))
}

/// Returns the moves from the experts that groups hold, in slot order, even if some experts are
/// missing. A group keeps what it already holds. Otherwise the holder that has sent least so far
/// sends the expert; of equal ones the first.
pub fn moves_from(held: &[Vec<usize>], to: &Placement) -> Moves {
    let mut moves = Moves::default();
    let mut sent = vec![0; held.len()];
    let mut sources: Vec<Vec<ExpertSlot>> = vec![Vec::new(); to.experts()];
    for (group, experts) in held.iter().enumerate() {
        for (slot, &expert) in experts.iter().enumerate() {
            if let Some(sources) = sources.get_mut(expert) {
                sources.push(ExpertSlot { group, slot });
            }
        }
    }
    for group in 0..to.groups() {
        for (slot, &expert) in to.of(group).iter().enumerate() {
            let here = sources[expert].iter().find(|source| source.group == group);
            // `min_by_key` returns the first of equal ones, so all ranks pick the same sender.
            let least = sources[expert]
                .iter()
                .min_by_key(|source| sent[source.group]);
            match (here, least) {
                (Some(here), _) => moves.kept.push(Kept {
                    group,
                    from: here.slot,
                    to: slot,
                }),
                (None, Some(&from)) => {
                    sent[from.group] += 1;
                    let to = ExpertSlot { group, slot };
                    moves.moves.push(Move { expert, from, to });
                }
                (None, None) => moves.missing.push(ExpertSlot { group, slot }),
            }
        }
    }
    moves
}
