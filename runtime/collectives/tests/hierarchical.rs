//! Exchanges over intermediate ranks against the direct exchange: plans of all ranks, executed in
//! memory.

mod blocks;
mod dedup;
mod interpreter;

use interpreter::{Mail, Memory, advance, replay};
use moesaic_collectives::schedules::{
    self, CollectivePlan, HopCounts, HopOrder, HopSchedule, ScheduleStep,
};
use moesaic_collectives::{Algorithm, Levels, NodeShape};
use std::time::Instant;

/// Returns a byte that identifies source, destination, block and offset.
fn byte(from: usize, to: usize, block: usize, at: usize) -> u8 {
    (from * 31 + to * 7 + block * 59 + at * 3 + at / 251) as u8
}

fn bytes(from: usize, to: usize, block: usize, count: usize) -> Vec<u8> {
    (0..count).map(|at| byte(from, to, block, at)).collect()
}

/// Returns the bytes of a block: awkward sizes, about a third of them zero.
fn size(from: usize, to: usize, block: usize) -> usize {
    let mut mixed = (from * 1009 + to * 9176 + block * 31 + 7) as u64;
    mixed = mixed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    match (mixed >> 40) % 3 {
        0 => 0,
        _ => (mixed >> 45) as usize % 67,
    }
}

fn algorithms(nodes: usize, per_node: usize) -> Vec<Algorithm> {
    let shape = NodeShape { nodes, per_node };
    let mut list = vec![
        Algorithm::Hierarchical(shape),
        Algorithm::InterFirst(shape),
        Algorithm::Concurrent(shape),
        Algorithm::Ring(shape.ranks()),
    ];
    let halves = |n: usize| {
        if n.is_multiple_of(2) {
            vec![2, n / 2]
        } else {
            vec![n]
        }
    };
    let levels = [halves(nodes), halves(per_node)].concat();
    list.push(Algorithm::Levels(Levels::new(&levels).unwrap()));
    list
}

/// Returns every number of ranks up to `most`, with every number of ranks per node.
fn shapes(most: usize) -> impl Iterator<Item = (usize, usize)> {
    let divides = |ranks: usize| (1..=ranks).filter(move |m| ranks.is_multiple_of(*m));
    (1..=most).flat_map(move |ranks| divides(ranks).map(move |m| (ranks / m, m)))
}

fn hops(algorithm: Algorithm) -> HopOrder {
    algorithm.hops().unwrap()
}

/// Packs a plan for executors of single messages, if asked to.
fn carried(plan: CollectivePlan, packed: bool) -> CollectivePlan {
    let plan = if packed { plan.packed() } else { plan };
    for step in plan.steps.iter().filter(|_| packed) {
        if let ScheduleStep::Exchange {
            sends, receives, ..
        } = step
        {
            for list in [sends, receives] {
                let mut peers: Vec<usize> = list.iter().map(|message| message.peer).collect();
                peers.sort_unstable();
                peers.dedup();
                assert_eq!(peers.len(), list.len(), "one message for each peer");
            }
        }
    }
    plan
}

fn equal(algorithm: Algorithm, count: usize, packed: bool) {
    let hops = hops(algorithm);
    let ranks = hops.ranks();
    let part = |from, to| bytes(from, to, 0, count);
    let input = |p: usize| (0..ranks).flat_map(|q| part(p, q)).collect();
    let mut memories: Vec<Memory> = (0..ranks)
        .map(|p| Memory::new(input(p), vec![0xDD; ranks * count]))
        .collect();
    let inputs = memories.clone();
    let sizes = vec![count; ranks];
    let plan = |rank: usize| {
        let schedule = HopSchedule::equal(hops.clone(), rank, count);
        carried(
            schedules::all_to_all_with(&schedule, &sizes, &sizes, 0),
            packed,
        )
    };
    replay(&(0..ranks).map(plan).collect::<Vec<_>>(), &mut memories);
    for (rank, memory) in memories.iter().enumerate() {
        let expected: Vec<u8> = (0..ranks).flat_map(|p| part(p, rank)).collect();
        assert!(
            memory.outputs[0] == expected,
            "{algorithm:?}, {count}: rank {rank}"
        );
        assert!(
            memory.inputs == inputs[rank].inputs,
            "the input was written"
        );
    }
}

#[test]
fn parts_of_one_size_arrive_as_directly() {
    for (nodes, per_node) in shapes(32) {
        for (i, algorithm) in algorithms(nodes, per_node).into_iter().enumerate() {
            // Sizes that are no multiple of a word too, so that no tail is lost.
            for count in [0, 1, 40, 67] {
                equal(algorithm, count, (count + i) % 2 == 1);
            }
        }
    }
}

/// Returns the hop counts of all ranks, from counts by source, destination and block.
fn hop_counts(
    hops: &HopOrder,
    blocks: usize,
    units: &dyn Fn(usize, usize, usize) -> usize,
) -> Vec<HopCounts> {
    let ranks = hops.ranks();
    let numbers = |p: usize| -> Vec<u64> {
        let all = (0..ranks).flat_map(|q| (0..blocks).map(move |i| (q, i)));
        all.map(|(q, i)| units(p, q, i) as u64).collect()
    };
    let plan = |rank: usize| schedules::count_hops(hops, rank, blocks, &numbers(rank));
    let mut memories = vec![Memory::default(); ranks];
    replay(&(0..ranks).map(plan).collect::<Vec<_>>(), &mut memories);
    let read = |(rank, memory): (usize, &Memory)| {
        let hop_counts = HopCounts::read(hops.clone(), rank, blocks, &memory.scratch);
        for p in 0..ranks {
            let own = &hop_counts.received()[p * blocks..(p + 1) * blocks];
            let expected: Vec<u64> = (0..blocks).map(|i| units(p, rank, i) as u64).collect();
            assert_eq!(own, expected, "from {p} to {rank}");
        }
        hop_counts
    };
    memories.iter().enumerate().map(read).collect()
}

#[test]
fn parts_by_counts_arrive_as_directly() {
    for (nodes, per_node) in shapes(32) {
        for (i, algorithm) in algorithms(nodes, per_node).into_iter().enumerate() {
            let hops = hops(algorithm);
            let ranks = hops.ranks();
            let counts = hop_counts(&hops, 1, &|p, q, _| size(p, q, 0));
            let sent = |p: usize| -> Vec<usize> { (0..ranks).map(|q| size(p, q, 0)).collect() };
            let got = |q: usize| -> Vec<usize> { (0..ranks).map(|p| size(p, q, 0)).collect() };
            let input = |p: usize| {
                (0..ranks)
                    .flat_map(|q| bytes(p, q, 0, size(p, q, 0)))
                    .collect()
            };
            let output = |q: usize| -> Vec<u8> {
                (0..ranks)
                    .flat_map(|p| bytes(p, q, 0, size(p, q, 0)))
                    .collect()
            };
            let mut memories: Vec<Memory> = (0..ranks)
                .map(|p| Memory::new(input(p), vec![0xDD; output(p).len()]))
                .collect();
            let inputs = memories.clone();
            let plan = |rank: usize| {
                let schedule = counts[rank].there(&|block| block.units as usize);
                let plan = schedules::all_to_all_with(&schedule, &sent(rank), &got(rank), 2);
                carried(plan, (nodes + i) % 2 == 1)
            };
            replay(&(0..ranks).map(plan).collect::<Vec<_>>(), &mut memories);
            for (rank, memory) in memories.iter().enumerate() {
                assert!(
                    memory.outputs[0] == output(rank),
                    "{algorithm:?}: rank {rank}"
                );
                assert!(
                    memory.inputs == inputs[rank].inputs,
                    "the input was written"
                );
            }
        }
    }
}

/// Counts messages and bytes of a rank of 4 nodes of 8.
#[test]
fn few_large_messages_cross_between_nodes() {
    let shape = NodeShape {
        nodes: 4,
        per_node: 8,
    };
    let (rank, count) = (9, 64);
    let far = |peer: usize| shape.split(peer).node != shape.split(rank).node;
    let sizes = vec![count; shape.ranks()];
    let direct = schedules::all_to_all(rank, &sizes, &sizes);
    assert_eq!((direct.messages(), direct.bytes_to(far)), (31, 24 * count));
    let planned = |algorithm: Algorithm| {
        let schedule = HopSchedule::equal(hops(algorithm), rank, count);
        schedules::all_to_all_with(&schedule, &sizes, &sizes, 0).packed()
    };
    for (algorithm, messages, near) in [
        (Algorithm::Hierarchical(shape), 7 + 3, 7 * 4),
        (Algorithm::InterFirst(shape), 7 + 3, 7 * 4),
        (Algorithm::Concurrent(shape), 2 * (7 + 3), 7 * 4),
        (
            Algorithm::Levels(Levels::new(&[4, 2, 4]).unwrap()),
            3 + 1 + 3,
            4 * 4 + 6 * 4,
        ),
    ] {
        let plan = planned(algorithm);
        assert_eq!(plan.messages(), messages, "{algorithm:?}");
        assert_eq!(plan.bytes_to(far), 24 * count, "{algorithm:?}");
        assert_eq!(
            plan.bytes_to(|peer| !far(peer)),
            near * count,
            "{algorithm:?}"
        );
    }
}

/// Each hop is one message to the next rank, with one block less than the hop before; on the way
/// back, to the previous rank.
#[test]
fn a_ring_sends_to_neighbours_alone() {
    let (rank, ranks, count) = (3, 5, 16);
    let around = hops(Algorithm::Ring(ranks));
    let sizes = vec![count; ranks];
    for (hops, peer, blocks) in [
        (around.clone(), 4, [4, 3, 2, 1]),
        (around.back(), 2, [1, 2, 3, 4]),
    ] {
        let schedule = HopSchedule::equal(hops, rank, count);
        let plan = schedules::all_to_all_with(&schedule, &sizes, &sizes, 0).packed();
        let [sent, _] = plan.traffic();
        assert_eq!(sent, blocks.map(|blocks| (peer, blocks * count)));
    }
}

/// Both halves keep each kind of link about equally busy in either phase.
#[test]
fn the_concurrent_exchange_keeps_both_kinds_of_links_busy() {
    let shape = NodeShape {
        nodes: 4,
        per_node: 8,
    };
    let (rank, count) = (9, 640);
    let sizes = vec![count; shape.ranks()];
    let schedule = HopSchedule::equal(HopOrder::concurrent(shape), rank, count);
    let plan = schedules::all_to_all_with(&schedule, &sizes, &sizes, 0);
    let far = |peer: usize| shape.split(peer).node != shape.split(rank).node;
    let sent = |step: &ScheduleStep| match step {
        ScheduleStep::Exchange { sends, .. } => {
            let bytes = |across: bool| -> usize {
                let own = sends.iter().filter(|message| far(message.peer) == across);
                own.map(|message| message.span.bytes).sum()
            };
            (bytes(true), bytes(false))
        }
        _ => (0, 0),
    };
    let phases: Vec<(usize, usize)> = plan.steps.iter().map(sent).collect();
    // Blocks for the own node, and those for the rank's own place elsewhere, go in the first hop.
    let halves = 3 * 7 * count / 2;
    assert_eq!(
        phases,
        [(halves + 3 * count, halves + 7 * count), (halves, halves)]
    );
}

/// Runs exchanges of equal parts one phase after the other, with the plans of one rank at a time
/// in memory.
fn in_phases(algorithm: Algorithm, count: usize) {
    let hops = hops(algorithm);
    let ranks = hops.ranks();
    let sizes = vec![count; ranks];
    let part = |from, to| bytes(from, to, 0, count);
    let memory = |rank: usize| {
        let input = (0..ranks).flat_map(|q| part(rank, q)).collect();
        Memory::new(input, vec![0xDD; ranks * count])
    };
    let mut memories: Vec<Memory> = (0..ranks).map(memory).collect();
    let plan = |rank: usize| {
        let schedule = HopSchedule::equal(hops.clone(), rank, count);
        schedules::all_to_all_with(&schedule, &sizes, &sizes, 0).packed()
    };
    let (mut at, mut mail) = (vec![(0, false); ranks], Mail::new());
    while let Some(step) = at.iter().map(|(step, _)| *step).min() {
        let mut ended = true;
        for (rank, memory) in memories.iter_mut().enumerate() {
            let plan = plan(rank);
            memory.scratch.resize(plan.scratch, 0xEE);
            while let Some(next) = plan.steps.get(at[rank].0) {
                ended = false;
                if !advance(rank, next, &mut at[rank].1, memory, &mut mail) {
                    break;
                }
                at[rank] = (at[rank].0 + 1, false);
            }
        }
        if ended {
            break;
        }
        let _ = step;
    }
    for (rank, memory) in memories.iter().enumerate() {
        let right = (0..ranks).all(|p| memory.outputs[0][p * count..][..count] == part(p, rank));
        assert!(right, "{algorithm:?}: rank {rank}");
    }
}

/// Set `MOESAIC_RANKS` to 2048 or more for that many ranks.
#[test]
fn thousands_of_ranks_get_what_they_get_directly() {
    let asked = std::env::var("MOESAIC_RANKS").ok();
    let Some(ranks) = asked.and_then(|ranks| ranks.parse::<usize>().ok()) else {
        return;
    };
    let shape = NodeShape {
        nodes: ranks / 8,
        per_node: 8,
    };
    let levels = Levels::new(&[ranks / 128, 16, 8]).unwrap();
    for algorithm in [
        Algorithm::Hierarchical(shape),
        Algorithm::InterFirst(shape),
        Algorithm::Concurrent(shape),
        Algorithm::Levels(levels),
    ] {
        let start = Instant::now();
        in_phases(algorithm, 3);
        println!(
            "{ranks} ranks, {algorithm:?}: {:.1} s",
            start.elapsed().as_secs_f64()
        );
    }
}
