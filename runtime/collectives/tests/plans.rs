//! Plans of all ranks, executed in memory: no transport, no device.

mod interpreter;

use interpreter::{Memory, replay};
use moesaic_collectives::schedules::{self, CollectivePlan, ScheduleStep};
use moesaic_collectives::{CommElement, Reduction};

/// Returns bytes that identify source, destination and offset.
fn part(from: usize, to: usize, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|i| (from * 31 + to * 7 + i * 3) as u8)
        .collect()
}

/// Returns sizes by source and destination; about a third are zero.
fn sizes(ranks: usize, seed: usize) -> Vec<Vec<usize>> {
    let mut state = seed as u64 + 1;
    let mut next = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) as usize
    };
    let mut size = || if next() % 3 == 0 { 0 } else { next() % 41 };
    (0..ranks)
        .map(|_| (0..ranks).map(|_| size()).collect())
        .collect()
}

fn memories(sizes: &[Vec<usize>]) -> (Vec<Memory>, Vec<Vec<u8>>) {
    let ranks = sizes.len();
    let input = |p: usize| {
        (0..ranks)
            .flat_map(|q| part(p, q, sizes[p][q]))
            .collect::<Vec<u8>>()
    };
    let output = |q: usize| {
        (0..ranks)
            .flat_map(|p| part(p, q, sizes[p][q]))
            .collect::<Vec<u8>>()
    };
    let expected: Vec<Vec<u8>> = (0..ranks).map(output).collect();
    let memory = |p: usize| Memory::new(input(p), vec![0xDD; expected[p].len()]);
    ((0..ranks).map(memory).collect(), expected)
}

fn received(sizes: &[Vec<usize>], rank: usize) -> Vec<usize> {
    sizes.iter().map(|row| row[rank]).collect()
}

fn check_outputs(memories: &[Memory], expected: &[Vec<u8>], inputs: &[Memory], what: &str) {
    for (rank, memory) in memories.iter().enumerate() {
        assert!(
            memory.outputs[0] == expected[rank],
            "{what}: output of rank {rank}"
        );
        assert!(
            memory.inputs == inputs[rank].inputs,
            "{what}: input of rank {rank}"
        );
    }
}

#[test]
fn direct_exchange_puts_parts_in_the_order_of_ranks() {
    for ranks in [1, 2, 3, 8, 17] {
        let sizes = sizes(ranks, ranks);
        let (mut memories, expected) = memories(&sizes);
        let inputs = memories.clone();
        let plan = |p: usize| schedules::all_to_all(p, &sizes[p], &received(&sizes, p));
        replay(&(0..ranks).map(plan).collect::<Vec<_>>(), &mut memories);
        check_outputs(&memories, &expected, &inputs, &format!("{ranks} ranks"));
    }
}

#[test]
fn gathers_broadcasts_and_barriers_reach_everybody() {
    for ranks in [1, 2, 3, 5, 8, 13] {
        let lengths: Vec<usize> = (0..ranks).map(|rank| rank * 3 % 7).collect();
        let all: Vec<u8> = (0..ranks).flat_map(|p| part(p, 0, lengths[p])).collect();
        let memory = |p: usize| Memory::new(part(p, 0, lengths[p]), vec![0xDD; all.len()]);
        let mut memories: Vec<Memory> = (0..ranks).map(memory).collect();
        let plans: Vec<CollectivePlan> = (0..ranks)
            .map(|p| schedules::all_gather(p, &lengths))
            .collect();
        replay(&plans, &mut memories);
        assert!(
            memories.iter().all(|memory| memory.outputs[0] == all),
            "{ranks} ranks"
        );
        for root in 0..ranks {
            memories[root].outputs[0] = part(root, 1, all.len());
            let plan = |p: usize| schedules::broadcast(p, ranks, root, all.len());
            replay(&(0..ranks).map(plan).collect::<Vec<_>>(), &mut memories);
            let expected = part(root, 1, all.len());
            assert!(
                memories.iter().all(|memory| memory.outputs[0] == expected),
                "root {root}"
            );
        }
        replay(
            &(0..ranks)
                .map(|p| schedules::barrier(p, ranks))
                .collect::<Vec<_>>(),
            &mut memories,
        );
    }
}

#[test]
fn reductions_add_every_rank_once() {
    for (ranks, elements) in [(1, 5), (3, 12), (4, 5000), (5, 5001), (8, 3)] {
        let sum =
            |i: usize| (0..ranks).fold(0u8, |sum, p| sum.wrapping_add(part(p, 0, elements)[i]));
        let expected: Vec<u8> = (0..elements).map(sum).collect();
        let memory = |p: usize| Memory::new(part(p, 0, elements), vec![0xDD; elements]);
        let mut memories: Vec<Memory> = (0..ranks).map(memory).collect();
        let plan =
            |p: usize| schedules::all_reduce(p, ranks, elements, CommElement::U8, Reduction::Sum);
        replay(&(0..ranks).map(plan).collect::<Vec<_>>(), &mut memories);
        assert!(
            memories.iter().all(|memory| memory.outputs[0] == expected),
            "{ranks}, {elements}"
        );
    }
}

#[test]
fn all_plans_of_a_barrier_meet_every_rank_before_any_leaves() {
    // With one rank that never starts, no rank may reach the end.
    for ranks in [2, 3, 7, 8] {
        for absent in 0..ranks {
            let mut reached: Vec<Vec<bool>> = (0..ranks)
                .map(|p| (0..ranks).map(|q| p == q).collect())
                .collect();
            let rounds = schedules::barrier(0, ranks).steps.len();
            for round in 0..rounds {
                let before = reached.clone();
                for (rank, known) in reached.iter_mut().enumerate() {
                    let ScheduleStep::Exchange { receives, .. } =
                        &schedules::barrier(rank, ranks).steps[round]
                    else {
                        panic!("a barrier is exchanges")
                    };
                    let peer = receives[0].peer;
                    known
                        .iter_mut()
                        .zip(&before[peer])
                        .for_each(|(k, b)| *k |= b);
                }
            }
            assert!(reached.iter().all(|known| known[absent]), "{ranks} ranks");
        }
    }
}
