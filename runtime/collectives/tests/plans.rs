//! Plans of all ranks, carried out in memory: no engine, no device.

use moesaic_collectives::plan::{self, Copy, Message, Place, Plan, Span, Step, Transit};
use moesaic_collectives::{Element, NodeShape, Reduction};
use std::collections::{HashMap, VecDeque};

/// A rank's memory.
#[derive(Clone, Default)]
struct Memory {
    input: Vec<u8>,
    output: Vec<u8>,
    scratch: Vec<u8>,
}

impl Memory {
    fn of(&mut self, place: Place) -> &mut Vec<u8> {
        match place {
            Place::Input(_) => &mut self.input,
            Place::Output(_) => &mut self.output,
            Place::Scratch => &mut self.scratch,
        }
    }

    fn read(&mut self, span: &Span) -> Vec<u8> {
        self.of(span.place)[span.offset..span.offset + span.bytes].to_vec()
    }

    fn write(&mut self, place: Place, offset: usize, bytes: &[u8]) {
        self.of(place)[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    fn copy(&mut self, copies: &[Copy]) {
        for copy in copies {
            let bytes = self.read(&copy.from);
            self.write(copy.to, copy.offset, &bytes);
        }
    }
}

type Mail = HashMap<(u32, usize, usize), VecDeque<Vec<u8>>>;

/// Runs all plans; ranks go on as far as they can, in turns.
fn replay(plans: &[Plan], memories: &mut [Memory]) {
    let mut mail = Mail::new();
    let mut at = vec![(0, false); plans.len()];
    for (memory, plan) in memories.iter_mut().zip(plans) {
        memory.scratch = vec![0xEE; plan.scratch];
    }
    while at
        .iter()
        .zip(plans)
        .any(|((step, _), plan)| *step < plan.steps.len())
    {
        let before = at.clone();
        for (rank, plan) in plans.iter().enumerate() {
            while let Some(step) = plan.steps.get(at[rank].0) {
                if !advance(rank, step, &mut at[rank].1, &mut memories[rank], &mut mail) {
                    break;
                }
                at[rank] = (at[rank].0 + 1, false);
            }
        }
        assert_ne!(before, at, "the plans wait for each other");
    }
    assert!(
        mail.values().all(VecDeque::is_empty),
        "a message was not received"
    );
}

/// Whether the step is complete.
fn advance(
    rank: usize,
    step: &Step,
    sent: &mut bool,
    memory: &mut Memory,
    mail: &mut Mail,
) -> bool {
    match step {
        Step::Exchange {
            phase,
            sends,
            receives,
            copies,
            ..
        } => {
            if !std::mem::replace(sent, true) {
                memory.copy(copies);
                for Message { peer, span } in sends {
                    let bytes = memory.read(span);
                    mail.entry((*phase, rank, *peer))
                        .or_default()
                        .push_back(bytes);
                }
            }
            let there = |m: &Message| {
                mail.get(&(*phase, m.peer, rank)).map_or(0, VecDeque::len)
                    >= receives.iter().filter(|other| other.peer == m.peer).count()
            };
            if !receives.iter().all(there) {
                return false;
            }
            for Message { peer, span } in receives {
                let queue = mail.get_mut(&(*phase, *peer, rank)).unwrap();
                let bytes = queue.pop_front().unwrap();
                assert_eq!(bytes.len(), span.bytes, "from {peer} to {rank}");
                memory.write(span.place, span.offset, &bytes);
            }
        }
        Step::Repack(copies) => memory.copy(copies),
        Step::Write(offset, numbers) => {
            let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
            memory.write(Place::Scratch, *offset, &bytes);
        }
        Step::Reduce {
            rows,
            row_bytes,
            to,
            offset,
            ..
        } => {
            // Only sums of bytes are reduced here.
            let rows = &memory.scratch[rows.clone()];
            let sum = |i: usize| {
                rows.iter()
                    .skip(i)
                    .step_by(*row_bytes)
                    .fold(0u8, |a, b| a.wrapping_add(*b))
            };
            let sums: Vec<u8> = (0..*row_bytes).map(sum).collect();
            memory.write(*to, *offset, &sums);
        }
        Step::Check { numbers, .. } => {
            for (offset, expected, peer) in numbers {
                let bytes = memory.scratch[*offset..offset + 8].try_into().unwrap();
                assert_eq!(u64::from_le_bytes(bytes), *expected, "from {peer}");
            }
        }
    }
    true
}

/// Bytes that name source, destination and place.
fn part(from: usize, to: usize, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|i| (from * 31 + to * 7 + i * 3) as u8)
        .collect()
}

/// Sizes by source and destination; about a third is zero.
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
    let memory = |p: usize| Memory {
        input: input(p),
        output: vec![0xDD; expected[p].len()],
        scratch: Vec::new(),
    };
    ((0..ranks).map(memory).collect(), expected)
}

fn received(sizes: &[Vec<usize>], rank: usize) -> Vec<usize> {
    sizes.iter().map(|row| row[rank]).collect()
}

fn check_outputs(memories: &[Memory], expected: &[Vec<u8>], inputs: &[Memory], what: &str) {
    for (rank, memory) in memories.iter().enumerate() {
        assert!(
            memory.output == expected[rank],
            "{what}: output of rank {rank}"
        );
        assert!(
            memory.input == inputs[rank].input,
            "{what}: input of rank {rank}"
        );
    }
}

const SHAPES: [(usize, usize); 12] = [
    (1, 1),
    (1, 4),
    (4, 1),
    (2, 2),
    (2, 4),
    (4, 2),
    (3, 4),
    (4, 3),
    (2, 3),
    (8, 8),
    (3, 8),
    (16, 4),
];

#[test]
fn direct_exchange_puts_parts_in_the_order_of_ranks() {
    for ranks in [1, 2, 3, 8, 17] {
        let sizes = sizes(ranks, ranks);
        let (mut memories, expected) = memories(&sizes);
        let inputs = memories.clone();
        let plan = |p: usize| plan::all_to_all(p, &sizes[p], &received(&sizes, p));
        replay(&(0..ranks).map(plan).collect::<Vec<_>>(), &mut memories);
        check_outputs(&memories, &expected, &inputs, &format!("{ranks} ranks"));
    }
}

#[test]
fn hierarchical_exchange_of_equal_parts_is_the_direct_one() {
    for (nodes, per_node) in SHAPES {
        let shape = NodeShape { nodes, per_node };
        // Sizes that are no multiple of a word, too: nothing may be cut off.
        for bytes in [0, 1, 24, 40, 64] {
            let sizes = vec![vec![bytes; shape.ranks()]; shape.ranks()];
            let (mut memories, expected) = memories(&sizes);
            let inputs = memories.clone();
            let transit = Transit::equal(shape, bytes);
            let plan = |p: usize| {
                plan::hierarchical(p, shape, &sizes[p], &received(&sizes, p), &transit, false)
            };
            let plans: Vec<Plan> = (0..shape.ranks()).map(plan).collect();
            assert_eq!(plans[0].messages(), per_node - 1 + nodes - 1);
            replay(&plans, &mut memories);
            check_outputs(
                &memories,
                &expected,
                &inputs,
                &format!("{shape:?}, {bytes} bytes"),
            );
        }
    }
}

#[test]
fn hierarchical_exchange_of_unequal_parts_is_the_direct_one() {
    for (seed, (nodes, per_node)) in SHAPES.into_iter().enumerate() {
        let shape = NodeShape { nodes, per_node };
        let sizes = sizes(shape.ranks(), seed);
        let (mut memories, expected) = memories(&sizes);
        let inputs = memories.clone();
        let counts = |p: usize| plan::counts_inside_node(p, shape, &sizes[p]);
        let plans: Vec<Plan> = (0..shape.ranks()).map(counts).collect();
        replay(&plans, &mut memories);
        let plan = |p: usize| {
            let transit = Transit::read(shape, &memories[p].scratch);
            plan::hierarchical(p, shape, &sizes[p], &received(&sizes, p), &transit, true)
        };
        let plans: Vec<Plan> = (0..shape.ranks()).map(plan).collect();
        replay(&plans, &mut memories);
        check_outputs(&memories, &expected, &inputs, &format!("{shape:?}"));
    }
}

#[test]
fn hierarchical_exchange_sends_as_many_bytes_between_nodes_in_fewer_messages() {
    let shape = NodeShape {
        nodes: 4,
        per_node: 8,
    };
    let sizes = vec![100; shape.ranks()];
    let direct = plan::all_to_all(9, &sizes, &sizes);
    let transit = Transit::equal(shape, 100);
    let hierarchical = plan::hierarchical(9, shape, &sizes, &sizes, &transit, false);
    let far = |peer: usize| shape.split(peer).0 != shape.split(9).0;
    assert_eq!(direct.bytes_to(far), 24 * 100);
    assert_eq!(hierarchical.bytes_to(far), 24 * 100);
    assert_eq!((direct.messages(), hierarchical.messages()), (31, 7 + 3));
}

#[test]
fn gathers_broadcasts_and_barriers_reach_everybody() {
    for ranks in [1, 2, 3, 5, 8, 13] {
        let lengths: Vec<usize> = (0..ranks).map(|rank| rank * 3 % 7).collect();
        let all: Vec<u8> = (0..ranks).flat_map(|p| part(p, 0, lengths[p])).collect();
        let memory = |p: usize| Memory {
            input: part(p, 0, lengths[p]),
            output: vec![0xDD; all.len()],
            scratch: Vec::new(),
        };
        let mut memories: Vec<Memory> = (0..ranks).map(memory).collect();
        let plans: Vec<Plan> = (0..ranks).map(|p| plan::all_gather(p, &lengths)).collect();
        replay(&plans, &mut memories);
        assert!(
            memories.iter().all(|memory| memory.output == all),
            "{ranks} ranks"
        );
        for root in 0..ranks {
            memories[root].output = part(root, 1, all.len());
            let plan = |p: usize| plan::broadcast(p, ranks, root, all.len());
            replay(&(0..ranks).map(plan).collect::<Vec<_>>(), &mut memories);
            let expected = part(root, 1, all.len());
            assert!(
                memories.iter().all(|memory| memory.output == expected),
                "root {root}"
            );
        }
        replay(
            &(0..ranks)
                .map(|p| plan::barrier(p, ranks))
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
        let memory = |p: usize| Memory {
            input: part(p, 0, elements),
            output: vec![0xDD; elements],
            scratch: Vec::new(),
        };
        let mut memories: Vec<Memory> = (0..ranks).map(memory).collect();
        let plan = |p: usize| plan::all_reduce(p, ranks, elements, Element::U8, Reduction::Sum);
        replay(&(0..ranks).map(plan).collect::<Vec<_>>(), &mut memories);
        assert!(
            memories.iter().all(|memory| memory.output == expected),
            "{ranks}, {elements}"
        );
    }
}

#[test]
fn all_plans_of_a_barrier_meet_every_rank_before_any_leaves() {
    // With one rank that never starts, nobody may come to the end.
    for ranks in [2, 3, 7, 8] {
        for absent in 0..ranks {
            let mut reached: Vec<Vec<bool>> = (0..ranks)
                .map(|p| (0..ranks).map(|q| p == q).collect())
                .collect();
            let rounds = plan::barrier(0, ranks).steps.len();
            for round in 0..rounds {
                let before = reached.clone();
                for (rank, known) in reached.iter_mut().enumerate() {
                    let Step::Exchange { receives, .. } = &plan::barrier(rank, ranks).steps[round]
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
