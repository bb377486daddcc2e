//! Messages of all-to-all algorithms against a simulation that follows every row from rank to
//! rank.

use super::*;
use crate::exchange::to_range;
use crate::published;

/// Returns the hops of a row.
fn hops(group: &MeshGroup, all_to_all: AllToAll, from: usize, to: usize) -> Vec<(usize, usize)> {
    let (node, ranks) = (group.units[0], group.ranks());
    if all_to_all == AllToAll::Ring {
        let distance = (to + ranks - from) % ranks;
        let at = |hops: usize| (from + hops) % ranks;
        return (0..distance).map(|hop| (at(hop), at(hop + 1))).collect();
    }
    let via = match all_to_all {
        AllToAll::TwoDh => from / node * node + to % node,
        AllToAll::TwoDhInterFirst => to / node * node + from % node,
        _ => from,
    };
    let all = [(from, via), (via, to)];
    all.into_iter().filter(|(a, b)| a != b).collect()
}

fn followed(
    group: &MeshGroup,
    all_to_all: AllToAll,
    rows: impl Fn(usize, usize) -> f64,
) -> Vec<[f64; 4]> {
    let mut moved = vec![[0.0; 4]; group.ranks()];
    for from in 0..group.ranks() {
        for to in 0..group.ranks() {
            for (a, b) in hops(group, all_to_all, from, to) {
                let level = group.level(a, b).unwrap();
                moved[a][level] += rows(from, to);
                moved[b][2 + level] += rows(from, to);
            }
        }
    }
    moved
}

fn sums(traffic: &Traffic) -> Vec<[f64; 4]> {
    let of = |rank: usize| {
        let mut sums = [0.0; 4];
        for step in &traffic.steps {
            for level in 0..2 {
                sums[level] += step.loads[rank][level].sent;
                sums[2 + level] += step.loads[rank][level].received;
            }
        }
        sums
    };
    (0..traffic.own.len()).map(of).collect()
}

const ALGORITHMS: [AllToAll; 5] = [
    AllToAll::Linear,
    AllToAll::TwoDh,
    AllToAll::TwoDhInterFirst,
    AllToAll::TwoDhConcurrent,
    AllToAll::Ring,
];

/// Returns rows of each rank by expert: unequal ones with some ranks empty, and equal ones.
fn counts(ranks: usize, experts: usize) -> [Vec<Vec<u64>>; 2] {
    let count = |rank: usize, e: usize| ((rank * 7 + e * 5) % 11 * (rank % 3)) as u64;
    let unequal: Vec<Vec<u64>> = (0..ranks)
        .map(|rank| (0..experts).map(|e| count(rank, e)).collect())
        .collect();
    let alike = vec![unequal[1].clone(); ranks];
    [unequal, alike]
}

#[test]
fn every_row_takes_the_messages_that_are_counted() {
    let experts = 9;
    for (ep, expert_tp, node) in [(6, 2, 4), (8, 1, 2), (3, 4, 4), (4, 1, 4), (5, 1, 8)] {
        let mesh = Parallel {
            ep,
            expert_tp,
            dp: 2,
            ..Parallel::default()
        };
        let machine = published("h800").unwrap().with_per_node(node);
        let placement = Placement::contiguous(ep, experts);
        for counts in &counts(mesh.ranks(), experts) {
            let routing = RoutedRows::counted(mesh.ranks(), experts, 2, counts).unwrap();
            for start in [0, mesh.group()] {
                let group = MeshGroup::new(&machine, mesh, start, &routing, &placement);
                for all_to_all in ALGORITHMS {
                    if all_to_all.row().needs_nodes() && !group.has_nodes() {
                        continue;
                    }
                    let rows = |from: usize, to: usize| {
                        let own = mesh.experts(to / expert_tp, experts);
                        counts[start + from][own].iter().sum::<u64>() as f64
                    };
                    let expected = match all_to_all {
                        AllToAll::TwoDhConcurrent => {
                            let both = [AllToAll::TwoDh, AllToAll::TwoDhInterFirst];
                            let [a, b] = both.map(|all_to_all| followed(&group, all_to_all, rows));
                            let mean = |(a, b): (&[f64; 4], &[f64; 4])| {
                                std::array::from_fn(|at| (a[at] + b[at]) / 2.0)
                            };
                            a.iter().zip(&b).map(mean).collect()
                        }
                        all_to_all => followed(&group, all_to_all, rows),
                    };
                    let found = sums(&group.traffic(all_to_all));
                    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                        assert!(
                            (found - expected).abs() < 1e-6,
                            "{mesh:?} {node} {all_to_all}"
                        );
                    }
                }
            }
        }
    }
}

/// A row for fewer shards than exist goes to the ranks of its expert's blocks with its own rank's
/// place, and returns from the shard with that rank's number.
#[test]
fn a_row_stays_with_ranks_of_its_place() {
    let experts = 9;
    for (ep, expert_tp, adaptive_r, node) in
        [(3, 4, 1, 4), (3, 4, 2, 4), (2, 6, 3, 4), (4, 2, 1, 2)]
    {
        let mesh = Parallel {
            ep,
            expert_tp,
            ..Parallel::default()
        };
        let block = expert_tp / adaptive_r;
        let machine = published("h800").unwrap().with_per_node(node);
        let placement = Placement::contiguous(ep, experts);
        for counts in &counts(mesh.ranks(), experts) {
            let routing = RoutedRows::counted(mesh.ranks(), experts, 2, counts).unwrap();
            let group = MeshGroup::new(&machine, mesh, 0, &routing, &placement).at_r(adaptive_r);
            let rows = |from: usize, to: usize| {
                let own = mesh.experts(to / expert_tp, experts);
                counts[from][own].iter().sum::<u64>() as f64
            };
            let there = |from: usize, to: usize| {
                let same = from % block == to % block;
                if same {
                    block as f64 * rows(from, to)
                } else {
                    0.0
                }
            };
            let back = |from: usize, to: usize| {
                let same = from % expert_tp == to % expert_tp;
                if same { rows(to, from) } else { 0.0 }
            };
            let check = |found: &Traffic, expected: Vec<[f64; 4]>, peers: usize| {
                let found_sums = sums(found);
                for (found, expected) in found_sums.iter().flatten().zip(expected.iter().flatten())
                {
                    assert!(
                        (found - expected).abs() < 1e-6,
                        "{mesh:?} {adaptive_r} {node}"
                    );
                }
                for loads in &found.steps[0].loads {
                    let all: f64 = loads.iter().map(|load| load.peers).sum();
                    assert_eq!(all, peers as f64 - 1.0, "{mesh:?} {adaptive_r} {node}");
                }
            };
            let linear = followed(&group, AllToAll::Linear, there);
            check(&group.traffic(AllToAll::Linear), linear, ep * adaptive_r);
            check(
                &group.answers(),
                followed(&group, AllToAll::Linear, back),
                ep,
            );
        }
    }
}

#[test]
fn a_token_crosses_to_a_node_once() {
    let machine = published("h800").unwrap().with_per_node(4);
    let mesh = Parallel {
        ep: 16,
        ..Parallel::default()
    };
    let routing = RoutedRows::even(1000, 64, 8);
    let placement = Placement::contiguous(16, 64);
    let group = MeshGroup::new(&machine, mesh, 0, &routing, &placement);
    let once = sums(&group.traffic(AllToAll::Dedup));
    let each = 1000.0 * crate::expected_groups(64.0, 8, 4.0) / 4.0;
    assert!((once[0][1] - 3.0 * each).abs() < 1e-6);
    let many = sums(&group.traffic(AllToAll::TwoDhInterFirst));
    assert!(once[0][1] < 0.5 * many[0][1] && once[0][0] == many[0][0]);
}

#[test]
fn a_token_goes_to_a_rank_once() {
    let machine = published("h800").unwrap().with_per_node(4);
    let mesh = Parallel {
        ep: 16,
        ..Parallel::default()
    };
    let routing = RoutedRows::even(1000, 64, 8);
    let placement = Placement::contiguous(16, 64);
    let group = MeshGroup::new(&machine, mesh, 0, &routing, &placement);
    let once = sums(&group.traffic(AllToAll::DedupRanks));
    let each = 1000.0 * crate::expected_groups(64.0, 8, 16.0) / 16.0;
    for (found, peers) in once[5].iter().zip([3.0, 12.0, 3.0, 12.0]) {
        assert!((found - peers * each).abs() < 1e-6, "{once:?}");
    }
    let many = sums(&group.traffic(AllToAll::Linear));
    assert!(once[0][1] < 0.85 * many[0][1] && once[0][0] < 0.85 * many[0][0]);
}

#[test]
fn links_that_are_shared_carry_what_all_send() {
    let mut machine = published("h800").unwrap().with_per_node(2);
    machine.levels[1].shared = 2;
    let counts = vec![vec![9, 0, 0, 9], vec![0; 4], vec![0; 4], vec![0; 4]];
    let routing = RoutedRows::counted(4, 4, 1, &counts).unwrap();
    let mesh = Parallel {
        ep: 4,
        ..Parallel::default()
    };
    let placement = Placement::contiguous(mesh.ep, 4);
    let group = MeshGroup::new(&machine, mesh, 0, &routing, &placement);
    let step = &group.traffic(AllToAll::Linear).steps[0];
    let sent = |rank: usize| step.loads[rank][1].sent;
    assert_eq!([sent(0), sent(1), sent(2)], [4.5, 4.5, 0.0]);
}

#[test]
fn ranges_are_counted_by_level() {
    let machine = published("h800").unwrap().with_per_node(4);
    for rank in 0..16 {
        for (first, last, step) in [(0, 16, 1), (4, 12, 1), (1, 9, 2), (0, 16, 4), (3, 4, 1)] {
            let loads = to_range(&machine, rank, first..last, step, 10.0);
            let others = (first..last).step_by(step).filter(|other| *other != rank);
            let (near, far): (Vec<_>, Vec<_>) = others.partition(|other| other / 4 == rank / 4);
            let peers = [loads[0].peers, loads[1].peers];
            assert_eq!(
                peers,
                [near.len() as f64, far.len() as f64],
                "{rank} {first} {step}"
            );
            assert_eq!(loads[1].sent, 10.0 * far.len() as f64);
        }
    }
}

/// LevelLoads of experts at any place, some on several groups, follow the rule by which ranks share
/// replicas.
#[test]
fn replicas_get_what_ranks_send_them() {
    let (experts, expert_tp) = (9, 2);
    let mesh = Parallel {
        ep: 4,
        expert_tp,
        ..Parallel::default()
    };
    let machine = published("h800").unwrap().with_per_node(4);
    for text in [
        "8,0,3 | 1,+8 | 2,4-5,+8 | 6-7,+3",
        "near: 8,0,3 | 1,+8 | 2,4-5,+8 | 6-7,+3",
    ] {
        let placement: Placement = text.parse().unwrap();
        for counts in &counts(mesh.ranks(), experts) {
            // Six of each row, which two or three replicas can share evenly.
            let counts: Vec<Vec<u64>> = (counts.iter())
                .map(|rows| rows.iter().map(|n| 6 * n).collect())
                .collect();
            let routing = RoutedRows::counted(mesh.ranks(), experts, 2, &counts).unwrap();
            let group = MeshGroup::new(&machine, mesh, 0, &routing, &placement);
            let share = |from: usize, to: usize| {
                let source = RowSource {
                    rank: from,
                    ep: from / expert_tp,
                };
                let ep = to / expert_tp;
                let of = |(e, n): (usize, &u64)| placement.share(source, e, *n as usize, ep).len();
                counts[from].iter().enumerate().map(of).sum::<usize>() as f64
            };
            for all_to_all in ALGORITHMS
                .into_iter()
                .filter(|all_to_all| *all_to_all != AllToAll::TwoDhConcurrent)
            {
                let found = sums(&group.traffic(all_to_all));
                let expected = followed(&group, all_to_all, share);
                for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                    assert!((found - expected).abs() < 1e-6, "{text} {all_to_all}");
                }
            }
            for rank in 0..group.ranks() {
                let arriving: f64 = group.arriving(rank).iter().sum();
                let expected: f64 = (0..group.ranks()).map(|from| share(from, rank)).sum();
                assert!((arriving - expected).abs() < 1e-6, "{text} {rank}");
            }
        }
    }
}

/// A replica sends its expert's gradient to the owner, shard by shard.
#[test]
fn sums_of_replicas_go_to_owners() {
    let mesh = Parallel {
        ep: 3,
        expert_tp: 2,
        ..Parallel::default()
    };
    let machine = published("h800").unwrap().with_per_node(2);
    let routing = RoutedRows::even(8, 4, 1);
    let placement: Placement = "0-1 | 2,+0,+1 | 3,+0".parse().unwrap();
    let group = MeshGroup::new(&machine, mesh, 0, &routing, &placement);
    let moved = |rows: &LevelLoads| {
        rows.iter().fold((0.0, 0.0), |(sent, got), load| {
            (sent + load.sent, got + load.received)
        })
    };
    let found: Vec<(f64, f64)> = group.sums_of_replicas().iter().map(moved).collect();
    let expected = [(0.0, 3.0), (2.0, 0.0), (1.0, 0.0)];
    let expected: Vec<(f64, f64)> = expected.into_iter().flat_map(|of| [of; 2]).collect();
    assert_eq!(found, expected);
}
