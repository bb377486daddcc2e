//! Shadowed experts, which every rank of a group holds for one call: their choice, the broadcast
//! of their weights, and the reduction of their gradients (docs/adaptive/placement.md).

use crate::exchange::{LevelLoad, MOST_LEVELS};
use crate::traffic::{LevelLoads, MeshGroup};
use moesaic_plan::{ShadowModel, shadows};

/// The shadows of one group of ranks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shadows {
    /// The shadowed experts, one owner's after the other's.
    pub experts: Vec<usize>,
    /// The rounds of the broadcast tree of each expert's weights. Each round lists the distinct
    /// loads of ranks, with the weights counted as one byte.
    pub trees: Vec<Vec<Vec<LevelLoads>>>,
    /// The load of each rank where gradients are summed at their owners, with an expert's
    /// gradients counted as one byte.
    pub sums: Vec<LevelLoads>,
}

impl Shadows {
    /// Returns the shadows that a call chooses for the ranks' rows.
    pub fn of(model: &ShadowModel, group: &MeshGroup) -> Shadows {
        let placement = group.placement;
        let counts: Vec<Vec<usize>> = (0..group.ranks())
            .map(|rank| group.counts(rank).iter().map(|n| n.round() as usize))
            .map(Iterator::collect)
            .collect();
        let mut experts = shadows(model, placement, group.mesh.expert_tp, &counts);
        // In owner order, because `sums` handles the experts of one owner together.
        experts.sort_by_key(|&expert| (placement.owner(expert), expert));
        let owners: Vec<usize> = experts.iter().map(|e| placement.owner(*e)).collect();
        Shadows {
            trees: owners.iter().map(|owner| tree(group, *owner)).collect(),
            sums: sums(group, &owners),
            experts,
        }
    }
}

/// Returns the rounds until all ranks have the owner's weights.
fn tree(group: &MeshGroup, owner: usize) -> Vec<Vec<LevelLoads>> {
    let rounds = group.ranks().next_power_of_two().trailing_zeros();
    let all = (0..rounds).map(|number| different(round(group, owner, number)));
    all.collect()
}

/// Returns the load of each rank in round `k`, in which the first `2^k` ranks, counted from the
/// owner, each send to the rank `2^k` further on.
fn round(group: &MeshGroup, owner: usize, number: u32) -> Vec<LevelLoads> {
    let (ranks, distance) = (group.ranks(), 1 << number);
    let mut step = group.nothing();
    // The last round is partial where the number of ranks is no power of two.
    for place in 0..distance.min(ranks - distance) {
        let between = [place, place + distance].map(|place| (place + owner) % ranks);
        group.sends(&mut step, between, 1.0);
    }
    group.share(&mut step);
    step.loads
}

/// Returns the loads where every rank sends its part of a sum to the owners.
fn sums(group: &MeshGroup, owners: &[usize]) -> Vec<LevelLoads> {
    let mut step = group.nothing();
    // One message carries the gradients of all shadows of an owner.
    for of_one in owners.chunk_by(|a, b| a == b) {
        for from in (0..group.ranks()).filter(|from| *from != of_one[0]) {
            group.sends(&mut step, [from, of_one[0]], of_one.len() as f64);
        }
    }
    group.share(&mut step);
    step.loads
}

fn different(loads: Vec<LevelLoads>) -> Vec<LevelLoads> {
    let mut list: Vec<LevelLoads> = Vec::new();
    let moves = |rows: &LevelLoads| rows.iter().any(|load| load.peers > 0.0);
    for rows in loads.into_iter().filter(moves) {
        // A round is as long as its slowest rank, so equal loads need only one entry.
        if !list.contains(&rows) {
            list.push(rows);
        }
    }
    list
}

/// Scales loads in rows by the bytes of a row.
pub(crate) fn times(rows: &LevelLoads, bytes: f64) -> [LevelLoad; MOST_LEVELS] {
    rows.map(|load| load.times(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Machine, RoutedRows, published};
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

    /// Every rank has the weights before it forwards them, and every rank gets them once.
    #[test]
    fn a_tree_reaches_every_rank_once() {
        let (machine, routing) = (machine(4), RoutedRows::even(8, 16, 1));
        for ranks in [1, 2, 3, 4, 7, 8, 16] {
            let placement = Placement::contiguous(ranks, 16);
            let group = MeshGroup::new(&machine, mesh(ranks), 0, &routing, &placement);
            for owner in [0, ranks - 1] {
                let rounds = tree(&group, owner);
                assert_eq!(rounds.len(), (ranks as f64).log2().ceil() as usize);
                assert!(rounds.iter().all(|round| !round.is_empty()));
                let mut has = vec![false; ranks];
                has[owner] = true;
                for number in 0..rounds.len() {
                    let before = has.clone();
                    for (rank, rows) in round(&group, owner, number as u32).iter().enumerate() {
                        let sum = |of: fn(&LevelLoad) -> f64| rows.iter().map(of).sum::<f64>();
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
        let routing = RoutedRows::counted(8, 8, 1, &vec![rows; 8]).unwrap();
        let placement = Placement::contiguous(8, 8);
        let group = MeshGroup::new(&machine, mesh(8), 0, &routing, &placement);
        let model = ShadowModel {
            most: 2,
            ..ShadowModel::fastmoe(64)
        };
        let found = Shadows::of(&model, &group);
        assert_eq!(found.experts, [5]);
        let total = |of: fn(&LevelLoad) -> f64| -> Vec<f64> {
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
