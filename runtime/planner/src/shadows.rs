//! Experts that every rank of a group has for one call: who has a shadow, how its weights
//! come, and how its gradients go back (docs/adaptive/placement.md).

use crate::exchange::{Load, MOST_LEVELS};
use crate::traffic::{Group, Rows};
use moesaic_plan::{ShadowModel, shadows};

/// The shadows of one group of ranks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shadows {
    /// One owner's after the other's.
    pub experts: Vec<usize>,
    /// Of each the rounds of the tree in which its weights go to all ranks, and in each round
    /// what some ranks move, of all that differ; weights are one byte.
    pub trees: Vec<Vec<Vec<Rows>>>,
    /// What each rank moves where gradients are summed at their owners; an expert's are one
    /// byte.
    pub sums: Vec<Rows>,
}

impl Shadows {
    /// Those that a call chooses where ranks have such rows.
    pub fn of(model: &ShadowModel, group: &Group) -> Shadows {
        let placement = group.placement;
        let counts: Vec<Vec<usize>> = (0..group.ranks())
            .map(|rank| group.counts(rank).iter().map(|n| n.round() as usize))
            .map(Iterator::collect)
            .collect();
        let mut experts = shadows(model, placement, group.mesh.expert_tp, &counts);
        experts.sort_by_key(|&expert| (placement.owner(expert), expert));
        let owners: Vec<usize> = experts.iter().map(|e| placement.owner(*e)).collect();
        Shadows {
            trees: owners.iter().map(|owner| tree(group, *owner)).collect(),
            sums: sums(group, &owners),
            experts,
        }
    }
}

/// Rounds until all ranks have what one had.
fn tree(group: &Group, owner: usize) -> Vec<Vec<Rows>> {
    let rounds = group.ranks().next_power_of_two().trailing_zeros();
    let all = (0..rounds).map(|number| different(round(group, owner, number)));
    all.collect()
}

/// What each rank moves in round `k`, in which each of the first `2^k` ranks, counted from the
/// owner, sends to the one `2^k` further.
fn round(group: &Group, owner: usize, number: u32) -> Vec<Rows> {
    let (ranks, distance) = (group.ranks(), 1 << number);
    let mut step = group.nothing();
    for place in 0..distance.min(ranks - distance) {
        let between = [place, place + distance].map(|place| (place + owner) % ranks);
        group.sends(&mut step, between, 1.0);
    }
    group.share(&mut step);
    step.loads
}

/// Every rank sends its part of a sum to those that own it.
fn sums(group: &Group, owners: &[usize]) -> Vec<Rows> {
    let mut step = group.nothing();
    for of_one in owners.chunk_by(|a, b| a == b) {
        for from in (0..group.ranks()).filter(|from| *from != of_one[0]) {
            group.sends(&mut step, [from, of_one[0]], of_one.len() as f64);
        }
    }
    group.share(&mut step);
    step.loads
}

fn different(loads: Vec<Rows>) -> Vec<Rows> {
    let mut list: Vec<Rows> = Vec::new();
    let moves = |rows: &Rows| rows.iter().any(|load| load.peers > 0.0);
    for rows in loads.into_iter().filter(moves) {
        if !list.contains(&rows) {
            list.push(rows);
        }
    }
    list
}

/// So many bytes for each of `rows`.
pub(crate) fn times(rows: &Rows, bytes: f64) -> [Load; MOST_LEVELS] {
    rows.map(|load| load.times(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Machine, Routing, published};
    use moesaic_plan::{Parallel, Placement};

    fn machine(per_node: usize) -> Machine {
        published("h100-ib").unwrap().with_per_node(per_node)
    }

    fn mesh(ep: usize) -> Parallel {
        Parallel {
            ep,
            ..Parallel::default()
        }
    }

    /// Whoever gets weights has them before it sends them on, and all get them once.
    #[test]
    fn a_tree_reaches_every_rank_once() {
        let (machine, routing) = (machine(4), Routing::even(8, 16, 1));
        for ranks in [1, 2, 3, 4, 7, 8, 16] {
            let placement = Placement::contiguous(ranks, 16);
            let group = Group::new(&machine, mesh(ranks), 0, &routing, &placement);
            for owner in [0, ranks - 1] {
                let rounds = tree(&group, owner);
                assert_eq!(rounds.len(), (ranks as f64).log2().ceil() as usize);
                assert!(rounds.iter().all(|round| !round.is_empty()));
                let mut has = vec![false; ranks];
                has[owner] = true;
                for number in 0..rounds.len() {
                    let before = has.clone();
                    for (rank, rows) in round(&group, owner, number as u32).iter().enumerate() {
                        let sum = |of: fn(&Load) -> f64| rows.iter().map(of).sum::<f64>();
                        let (sent, got) = (sum(|load| load.sent), sum(|load| load.received));
                        assert!(sent == 0.0 || before[rank], "{ranks} {owner} {rank}");
                        assert!(got == 0.0 || (got == 1.0 && !has[rank]));
                        has[rank] |= got > 0.0;
                    }
                }
                assert_eq!(has, vec![true; ranks]);
            }
        }
    }

    #[test]
    fn the_hot_expert_has_a_shadow_and_its_owner_gets_all_sums() {
        let machine = machine(4);
        let mut rows = vec![10u64; 8];
        rows[5] = 1000;
        let routing = Routing::counted(8, 8, 1, &vec![rows; 8]).unwrap();
        let placement = Placement::contiguous(8, 8);
        let group = Group::new(&machine, mesh(8), 0, &routing, &placement);
        let model = ShadowModel {
            most: 2,
            ..ShadowModel::fastmoe(64)
        };
        let found = Shadows::of(&model, &group);
        assert_eq!(found.experts, [5]);
        let total = |of: fn(&Load) -> f64| -> Vec<f64> {
            let each = found.sums.iter();
            each.map(|rows| rows.iter().map(of).sum()).collect()
        };
        let mut received = vec![0.0; 8];
        received[5] = 7.0;
        let sent: Vec<f64> = (0..8).map(|rank| f64::from(u8::from(rank != 5))).collect();
        assert_eq!(total(|load| load.received), received);
        assert_eq!(total(|load| load.sent), sent);
    }
}
