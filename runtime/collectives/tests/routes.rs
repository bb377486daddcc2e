//! Exchanges over other ranks against the direct one: plans of all ranks, carried out in
//! memory.

mod interpreter;

use interpreter::{Mail, Memory, advance, replay};
use moesaic_collectives::plan::{
    self, FanOut, Hops, Itinerary, Journey, Leg, Passage, Plan, RowBytes, Step,
};
use moesaic_collectives::{Algorithm, Element, Levels, NodeShape};
use std::sync::Arc;
use std::time::Instant;

/// A byte that names source, destination, piece and place.
fn byte(from: usize, to: usize, piece: usize, at: usize) -> u8 {
    (from * 31 + to * 7 + piece * 59 + at * 3 + at / 251) as u8
}

fn bytes(from: usize, to: usize, piece: usize, count: usize) -> Vec<u8> {
    (0..count).map(|at| byte(from, to, piece, at)).collect()
}

/// Bytes of a piece: awkward, and about a third are none.
fn size(from: usize, to: usize, piece: usize) -> usize {
    let mut mixed = (from * 1009 + to * 9176 + piece * 31 + 7) as u64;
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

/// Every number of ranks and of ranks a node up to these.
fn shapes(most: usize) -> impl Iterator<Item = (usize, usize)> {
    let divides = |ranks: usize| (1..=ranks).filter(move |m| ranks.is_multiple_of(*m));
    (1..=most).flat_map(move |ranks| divides(ranks).map(move |m| (ranks / m, m)))
}

fn hops(algorithm: Algorithm) -> Hops {
    algorithm.hops().unwrap()
}

/// Every second time as engines of single messages carry it.
fn carried(plan: Plan, packed: bool) -> Plan {
    let plan = if packed { plan.packed() } else { plan };
    for step in plan.steps.iter().filter(|_| packed) {
        if let Step::Exchange {
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
    let ranks = hops.levels.ranks();
    let part = |from, to| bytes(from, to, 0, count);
    let input = |p: usize| (0..ranks).flat_map(|q| part(p, q)).collect();
    let mut memories: Vec<Memory> = (0..ranks)
        .map(|p| Memory::new(input(p), vec![0xDD; ranks * count]))
        .collect();
    let inputs = memories.clone();
    let sizes = vec![count; ranks];
    let plan = |rank: usize| {
        let journey = Journey::equal(hops.clone(), rank, count);
        carried(plan::all_to_all_by(&journey, &sizes, &sizes, 0), packed)
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
            // Sizes that are no multiple of a word, too: nothing may be cut off.
            for count in [0, 1, 40, 67] {
                equal(algorithm, count, (count + i) % 2 == 1);
            }
        }
    }
}

/// Passages of all ranks, from counts by source, destination and piece.
fn told(hops: &Hops, pieces: usize, units: &dyn Fn(usize, usize, usize) -> usize) -> Vec<Passage> {
    let ranks = hops.levels.ranks();
    let numbers = |p: usize| -> Vec<u64> {
        let all = (0..ranks).flat_map(|q| (0..pieces).map(move |i| (q, i)));
        all.map(|(q, i)| units(p, q, i) as u64).collect()
    };
    let plan = |rank: usize| plan::tell(hops, rank, pieces, &numbers(rank));
    let mut memories = vec![Memory::default(); ranks];
    replay(&(0..ranks).map(plan).collect::<Vec<_>>(), &mut memories);
    let read = |(rank, memory): (usize, &Memory)| {
        let passage = Passage::read(hops.clone(), rank, pieces, &memory.scratch);
        for p in 0..ranks {
            let own = &passage.received()[p * pieces..(p + 1) * pieces];
            let expected: Vec<u64> = (0..pieces).map(|i| units(p, rank, i) as u64).collect();
            assert_eq!(own, expected, "from {p} to {rank}");
        }
        passage
    };
    memories.iter().enumerate().map(read).collect()
}

#[test]
fn parts_by_counts_arrive_as_directly() {
    for (nodes, per_node) in shapes(32) {
        for (i, algorithm) in algorithms(nodes, per_node).into_iter().enumerate() {
            let hops = hops(algorithm);
            let ranks = hops.levels.ranks();
            let passages = told(&hops, 1, &|p, q, _| size(p, q, 0));
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
                let journey = passages[rank].there(&|leg| leg.units as usize);
                let plan = plan::all_to_all_by(&journey, &sent(rank), &got(rank), 2);
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

/// Pieces go there and back again, each time from where they lie to where they belong.
#[test]
fn pieces_go_there_and_come_back() {
    for (nodes, per_node) in [(1, 1), (1, 3), (3, 1), (2, 2), (2, 3), (3, 4), (4, 8)] {
        for (i, algorithm) in algorithms(nodes, per_node).into_iter().enumerate() {
            let (hops, pieces, row) = (hops(algorithm), 3, 5 + i);
            let ranks = hops.levels.ranks();
            let rows = |p, q, i| size(p, q, i) % 5;
            let passages = told(&hops, pieces, &rows);
            // Of a rank all that it sends, or all that it gets, in an order of its own.
            let mine = |rank: usize, gets: bool| -> Vec<(usize, usize, usize, usize)> {
                let all = (0..pieces).flat_map(|i| (0..ranks).map(move |peer| (peer, i)));
                let pair = |peer: usize| if gets { (peer, rank) } else { (rank, peer) };
                let list = all.map(|(peer, i)| (pair(peer).0, pair(peer).1, i, peer));
                list.filter(|(p, q, i, _)| rows(*p, *q, *i) > 0).collect()
            };
            let list = |rank, gets, row: usize| -> Vec<(usize, usize)> {
                let mine = mine(rank, gets).into_iter();
                mine.map(|(p, q, i, peer)| (peer, rows(p, q, i) * row))
                    .collect()
            };
            let data = |rank, gets, row: usize| -> Vec<Vec<u8>> {
                let mine = mine(rank, gets).into_iter();
                mine.map(|(p, q, i, _)| bytes(p, q, i, rows(p, q, i) * row))
                    .collect()
            };
            for back in [false, true] {
                let row = row + usize::from(back);
                let scale = |leg: plan::Leg| leg.units as usize * row;
                let plan = |rank: usize| {
                    let journey = if back {
                        passages[rank].back(&scale)
                    } else {
                        passages[rank].there(&scale)
                    };
                    let (sends, receives) = (list(rank, back, row), list(rank, !back, row));
                    carried(plan::exchange_by(&journey, &sends, &receives), i % 2 == 0)
                };
                let memory = |rank: usize| Memory {
                    inputs: data(rank, back, row),
                    outputs: data(rank, !back, row)
                        .iter()
                        .map(|d| vec![0xDD; d.len()])
                        .collect(),
                    scratch: Vec::new(),
                };
                let mut memories: Vec<Memory> = (0..ranks).map(memory).collect();
                replay(&(0..ranks).map(plan).collect::<Vec<_>>(), &mut memories);
                for (rank, memory) in memories.iter().enumerate() {
                    let (expected, inputs) = (data(rank, !back, row), data(rank, back, row));
                    assert!(
                        memory.outputs == expected,
                        "{algorithm:?} {back}: rank {rank}"
                    );
                    assert!(memory.inputs == inputs, "the input was written");
                }
            }
        }
    }
}

/// Messages and bytes of a rank of 4 nodes of 8.
#[test]
fn few_large_messages_cross_between_nodes() {
    let shape = NodeShape {
        nodes: 4,
        per_node: 8,
    };
    let (rank, count) = (9, 64);
    let far = |peer: usize| shape.split(peer).0 != shape.split(rank).0;
    let sizes = vec![count; shape.ranks()];
    let direct = plan::all_to_all(rank, &sizes, &sizes);
    assert_eq!((direct.messages(), direct.bytes_to(far)), (31, 24 * count));
    let planned = |algorithm: Algorithm| {
        let journey = Journey::equal(hops(algorithm), rank, count);
        plan::all_to_all_by(&journey, &sizes, &sizes, 0).packed()
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

/// Of both halves each link carries about as much in either phase.
#[test]
fn the_concurrent_exchange_keeps_both_kinds_of_links_busy() {
    let shape = NodeShape {
        nodes: 4,
        per_node: 8,
    };
    let (rank, count) = (9, 640);
    let sizes = vec![count; shape.ranks()];
    let journey = Journey::equal(Hops::concurrent(shape), rank, count);
    let plan = plan::all_to_all_by(&journey, &sizes, &sizes, 0);
    let far = |peer: usize| shape.split(peer).0 != shape.split(rank).0;
    let sent = |step: &Step| match step {
        Step::Exchange { sends, .. } => {
            let bytes = |across: bool| -> usize {
                let own = sends.iter().filter(|message| far(message.peer) == across);
                own.map(|message| message.span.bytes).sum()
            };
            (bytes(true), bytes(false))
        }
        _ => (0, 0),
    };
    let phases: Vec<(usize, usize)> = plan.steps.iter().map(sent).collect();
    // Parts for the own node, and those for the rank's own place elsewhere, go in the first.
    let halves = 3 * 7 * count / 2;
    assert_eq!(
        phases,
        [(halves + 3 * count, halves + 7 * count), (halves, halves)]
    );
}

/// Runs exchanges of equal parts one phase after the other, with the plans of one rank at a
/// time in memory.
fn in_phases(algorithm: Algorithm, count: usize) {
    let hops = hops(algorithm);
    let ranks = hops.levels.ranks();
    let sizes = vec![count; ranks];
    let part = |from, to| bytes(from, to, 0, count);
    let memory = |rank: usize| {
        let input = (0..ranks).flat_map(|q| part(rank, q)).collect();
        Memory::new(input, vec![0xDD; ranks * count])
    };
    let mut memories: Vec<Memory> = (0..ranks).map(memory).collect();
    let plan = |rank: usize| {
        let journey = Journey::equal(hops.clone(), rank, count);
        plan::all_to_all_by(&journey, &sizes, &sizes, 0).packed()
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

/// `MOESAIC_RANKS=2048` or more: that many ranks.
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

/// Rows of tokens, each for some experts of some ranks, cross to a node once.
#[test]
fn tokens_cross_to_a_node_once() {
    for (nodes, per_node) in [(1, 1), (1, 4), (4, 1), (2, 2), (3, 2), (2, 3), (4, 4)] {
        let shape = NodeShape { nodes, per_node };
        let cases = [
            (1, false, Part::Rows(0, 1)),
            (3, true, Part::Rows(0, 1)),
            (3, false, Part::Rows(1, 3)),
            (2, false, Part::Ranks(1, 3)),
        ];
        for (experts, packed, part) in cases {
            once(shape, (experts, part), packed);
        }
    }
}

/// What goes: of each piece one part, or whole pieces over one distance out of some.
#[derive(Clone, Copy)]
enum Part {
    Rows(usize, usize),
    Ranks(usize, usize),
}

/// Rank 1 has no tokens, and those of rank 2 all go to one expert.
fn once(shape: NodeShape, (experts, part): (usize, Part), packed: bool) {
    const ROW: usize = 5;
    let ranks = shape.ranks();
    let tokens = |p: usize| if p == 1 { 0 } else { 4 + p % 3 };
    let goes = |p: usize, q: usize, e: usize, t: usize| match p {
        2 => q == 0 && e == 0,
        _ => (p * 13 + q * 7 + e * 5 + t * 11 + t * q) % 5 < 2,
    };
    let whole = |p: usize, q: usize, e: usize| -> Vec<usize> {
        (0..tokens(p)).filter(|t| goes(p, q, e, *t)).collect()
    };
    let cut = |rows: usize, p: usize, q: usize| match part {
        Part::Rows(number, of) => number * rows / of..(number + 1) * rows / of,
        Part::Ranks(number, of) if (q + ranks - p) % ranks % of == number => 0..rows,
        Part::Ranks(..) => 0..0,
    };
    let list = |p: usize, q: usize, e: usize| -> Vec<usize> {
        let whole = whole(p, q, e);
        whole[cut(whole.len(), p, q)].to_vec()
    };
    let goes = |p: usize, q: usize, e: usize, t: usize| list(p, q, e).contains(&t);
    let hops = Hops::inter_first(shape);
    let passages = told(&hops, experts, &|p, q, e| whole(p, q, e).len());
    let numbers = |p: usize, node: usize| {
        let all = (0..shape.per_node)
            .flat_map(|place| (0..experts).flat_map(move |e| whole(p, shape.rank(node, place), e)));
        plan::crossing(all.map(|token| token as u32))
    };
    let data = |p: usize, q: usize, e: usize| -> Vec<u8> {
        list(p, q, e)
            .iter()
            .flat_map(|t| bytes(p, *t, 3, ROW))
            .collect()
    };
    let pieces = |rank: usize, gets: bool| -> Vec<(usize, Vec<u8>)> {
        let all = (0..ranks).flat_map(|peer| (0..experts).map(move |e| (peer, e)));
        let piece = |(peer, e): (usize, usize)| {
            if gets {
                (peer, data(peer, rank, e))
            } else {
                (peer, data(rank, peer, e))
            }
        };
        all.map(piece)
            .filter(|(_, data)| !data.is_empty())
            .collect()
    };
    let sizes = |list: Vec<(usize, Vec<u8>)>| -> Vec<(usize, usize)> {
        list.iter()
            .map(|(peer, data)| (*peer, data.len()))
            .collect()
    };
    let far = |a: usize, b: usize| shape.split(a).0 != shape.split(b).0;
    let fan = |rank: usize| {
        let (node, place) = shape.split(rank);
        let sent = (0..shape.nodes).map(|other| numbers(rank, other)).collect();
        let from = |other| numbers(shape.rank(other, place), node);
        let passed = (0..shape.nodes).map(from).collect();
        let passage = Arc::new(passages[rank].clone());
        let fan = FanOut::new(shape, rank, passage, sent, passed).unwrap();
        let cut = |_: usize, leg: Leg| cut(leg.units as usize, leg.from, leg.to);
        Arc::new(fan.in_parts(0..1, &cut))
    };
    let plan = |rank: usize| {
        let node = shape.split(rank).0;
        let (sends, receives) = (sizes(pieces(rank, false)), sizes(pieces(rank, true)));
        let rows = fan(rank).of_rows(RowBytes::same(ROW));
        let plan = rows.plan((rank, ranks), &sends, &receives).unwrap();
        // What crosses is every token once for each node that has an expert of it.
        let needed = |t: usize, other: usize| {
            let there = (0..shape.per_node).map(|place| shape.rank(other, place));
            there
                .clone()
                .any(|q| (0..experts).any(|e| goes(rank, q, e, t)))
        };
        let others = (0..shape.nodes).filter(|other| *other != node);
        let rows: usize = others
            .map(|other| (0..tokens(rank)).filter(|t| needed(*t, other)).count())
            .sum();
        assert_eq!(
            plan.bytes_to(|peer| far(peer, rank)),
            rows * ROW,
            "{shape:?}"
        );
        carried(plan, packed)
    };
    let memory = |rank: usize| Memory {
        inputs: pieces(rank, false)
            .into_iter()
            .map(|(_, data)| data)
            .collect(),
        outputs: pieces(rank, true)
            .iter()
            .map(|(_, data)| vec![0xDD; data.len()])
            .collect(),
        scratch: Vec::new(),
    };
    let mut memories: Vec<Memory> = (0..ranks).map(memory).collect();
    let plans: Vec<Plan> = (0..ranks).map(plan).collect();
    replay(&plans, &mut memories);
    for (rank, memory) in memories.iter().enumerate() {
        let expected = pieces(rank, true).into_iter().map(|(_, data)| data);
        assert!(
            memory.outputs.iter().cloned().eq(expected),
            "{shape:?}: rank {rank}"
        );
    }
    // Back: of the ranks of a parity those of the same alone, or all.
    for every in [1, 2] {
        let answers = |from: usize, to: usize| from % every == to % every;
        let answer = |p: usize, q: usize, e: usize, t: usize| bytes(p + e, t + 5 * q, 1, ROW);
        let answered = |q: usize, p: usize, e: usize| {
            if answers(q, p) {
                list(p, q, e)
            } else {
                Vec::new()
            }
        };
        let pieces = |rank: usize, gets: bool| -> Vec<(usize, Vec<u8>)> {
            let all = (0..ranks).flat_map(|peer| (0..experts).map(move |e| (peer, e)));
            let piece = |(peer, e): (usize, usize)| {
                let (q, p) = if gets { (peer, rank) } else { (rank, peer) };
                let rows = answered(q, p, e);
                (
                    peer,
                    rows.into_iter().flat_map(|t| answer(p, q, e, t)).collect(),
                )
            };
            all.map(piece)
                .filter(|(_, data): &(_, Vec<u8>)| !data.is_empty())
                .collect()
        };
        let plan = |rank: usize| {
            let (sends, receives) = (sizes(pieces(rank, false)), sizes(pieces(rank, true)));
            let sums = fan(rank).summed((Element::U8, ROW), &answers);
            let plan = sums.plan((rank, ranks), &sends, &receives).unwrap();
            carried(plan, packed)
        };
        let memory = |rank: usize| Memory {
            inputs: pieces(rank, false)
                .into_iter()
                .map(|(_, data)| data)
                .collect(),
            outputs: pieces(rank, true)
                .iter()
                .map(|(_, data)| vec![0xDD; data.len()])
                .collect(),
            scratch: Vec::new(),
        };
        let mut memories: Vec<Memory> = (0..ranks).map(memory).collect();
        let plans: Vec<Plan> = (0..ranks).map(plan).collect();
        // A row returns for each token that a node has an answer for.
        let sums = |p: usize| {
            let has = |t: usize, node: usize| {
                let there = (0..shape.per_node).map(|place| shape.rank(node, place));
                there
                    .clone()
                    .any(|q| (0..experts).any(|e| answered(q, p, e).contains(&t)))
            };
            let others = (0..shape.nodes).filter(|node| *node != shape.split(p).0);
            let rows = others.map(|node| (0..tokens(p)).filter(|t| has(*t, node)).count());
            rows.sum::<usize>()
        };
        let cross = |(q, plan): (usize, &Plan)| plan.bytes_to(|peer| far(peer, q));
        let crossed: usize = plans.iter().enumerate().map(cross).sum();
        assert_eq!(crossed, (0..ranks).map(sums).sum::<usize>() * ROW);
        replay(&plans, &mut memories);
        for (p, memory) in memories.iter().enumerate() {
            // What each node has for a token adds up to the same.
            let mut sums = vec![0u8; tokens(p) * shape.nodes * ROW];
            let mut expected = sums.clone();
            let mut got = memory.outputs.iter();
            for (q, e) in (0..ranks).flat_map(|q| (0..experts).map(move |e| (q, e))) {
                let rows = answered(q, p, e);
                let Some(data) = (!rows.is_empty()).then(|| got.next().unwrap()) else {
                    continue;
                };
                for (row, t) in data.chunks(ROW).zip(rows) {
                    let at = (t * shape.nodes + shape.split(q).0) * ROW;
                    for (i, byte) in answer(p, q, e, t).into_iter().enumerate() {
                        expected[at + i] = expected[at + i].wrapping_add(byte);
                        sums[at + i] = sums[at + i].wrapping_add(row[i]);
                    }
                }
            }
            assert!(sums == expected, "{shape:?}, {every}: rank {p}");
        }
    }
}
