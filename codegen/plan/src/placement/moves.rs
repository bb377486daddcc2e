//! What travels when experts move: from what groups of ranks have to a placement.

use super::{Placement, PlacementError};

/// An expert that goes from group to group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Move {
    /// Which.
    pub expert: usize,
    /// The group that has it, and where among its experts.
    pub from: (usize, usize),
    /// The group that gets it, and where among its experts then.
    pub to: (usize, usize),
}

/// An expert that a group has before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kept {
    /// The group.
    pub group: usize,
    /// Where among its experts before.
    pub from: usize,
    /// Where after.
    pub to: usize,
}

/// All that it takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// In the order of the groups that get them, and of their experts.
    pub moves: Vec<Move>,
    /// What stays.
    pub kept: Vec<Kept>,
    /// What nobody has: group and place of each expert that has to come from elsewhere.
    pub missing: Vec<(usize, usize)>,
}

impl Moves {
    /// What a group sends.
    pub fn sent(&self, group: usize) -> impl Iterator<Item = &Move> {
        self.moves.iter().filter(move |one| one.from.0 == group)
    }

    /// What a group gets.
    pub fn got(&self, group: usize) -> impl Iterator<Item = &Move> {
        self.moves.iter().filter(move |one| one.to.0 == group)
    }
}

/// From one placement to another on the same groups. Nothing is missing.
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

/// From what groups have, in the order in which they have it, even where that is not all
/// there is. Of several groups that have an expert the one sends it that has sent least so
/// far, the first of these; what a group has itself stays.
pub fn moves_from(held: &[Vec<usize>], to: &Placement) -> Moves {
    let mut moves = Moves::default();
    let mut sent = vec![0; held.len()];
    let mut sources: Vec<Vec<(usize, usize)>> = vec![Vec::new(); to.experts()];
    for (group, experts) in held.iter().enumerate() {
        for (slot, &expert) in experts.iter().enumerate() {
            if let Some(sources) = sources.get_mut(expert) {
                sources.push((group, slot));
            }
        }
    }
    for group in 0..to.groups() {
        for (slot, &expert) in to.of(group).iter().enumerate() {
            let here = sources[expert].iter().find(|source| source.0 == group);
            let least = sources[expert].iter().min_by_key(|source| sent[source.0]);
            match (here, least) {
                (Some(&(group, from)), _) => moves.kept.push(Kept {
                    group,
                    from,
                    to: slot,
                }),
                (None, Some(&from)) => {
                    sent[from.0] += 1;
                    let to = (group, slot);
                    moves.moves.push(Move { expert, from, to });
                }
                (None, None) => moves.missing.push((group, slot)),
            }
        }
    }
    moves
}
