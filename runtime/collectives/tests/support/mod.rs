//! The tests that every transport must pass, as ranks see it.
#![allow(dead_code)]

use moesaic_collectives::schedules::RowBlock;
use moesaic_collectives::{
    Algorithm, Call, CollectiveError, Collectives, CommElement, Levels, NodeShape, Reduction,
    Slice, Transfer,
};
use moesaic_target::{Buffer, Device};
use std::sync::Arc;
use std::time::Duration;

pub fn call(label: &str) -> Call {
    Call::new(label).within(Duration::from_secs(20))
}

/// Returns a buffer with these bytes.
pub fn filled(device: &Arc<dyn Device>, bytes: &[u8]) -> Arc<Buffer> {
    let buffer = device.alloc(bytes.len().max(1)).unwrap();
    device.upload(bytes, &buffer, 0).unwrap();
    Arc::new(buffer)
}

pub fn slice(device: &Arc<dyn Device>, element: CommElement, bytes: &[u8]) -> Slice {
    let buffer = filled(device, bytes);
    Slice::new(&buffer, element, 0, bytes.len() / element.size()).unwrap()
}

/// Returns memory of nonzero elements.
pub fn unset(device: &Arc<dyn Device>, element: CommElement, elements: usize) -> Slice {
    slice(device, element, &vec![0xAB; elements * element.size()])
}

pub fn read(device: &Arc<dyn Device>, slice: &Slice) -> Vec<u8> {
    let mut bytes = vec![0; slice.bytes()];
    device
        .download(slice.buffer(), slice.offset(), &mut bytes)
        .unwrap();
    bytes
}

fn f32_bytes(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_ne_bytes).collect()
}

/// Returns bytes that identify source, destination and offset.
pub fn part(from: usize, to: usize, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|i| (from * 31 + to * 7 + i * 3 + i / 256) as u8)
        .collect()
}

/// Runs every operation once, with small, large and empty messages, on any number of ranks.
pub fn every_operation(world: &mut dyn Collectives, device: &Arc<dyn Device>) {
    for bytes in [0, 3, 4000, 100_000] {
        equal_exchange(world, device, bytes);
        gather_and_broadcast(world, device, bytes);
    }
    for scale in [1, 3000] {
        unequal_exchange(world, device, scale);
    }
    for elements in [0, 1, 7, 5000] {
        reductions(world, device, elements);
    }
    messages(world, device);
    for scale in [1, 700, 40_000] {
        rows_apart(world, device, scale);
    }
    for row in [3, 9_000] {
        over_other_ranks(world, device, row);
    }
    several_at_once(world, device);
    groups(world, device);
    world.barrier(&call("end")).unwrap().wait().unwrap();
}

/// Returns the algorithms that this number of ranks allows.
fn algorithms(ranks: usize) -> Vec<Algorithm> {
    let shapes = (1..=ranks).filter(|per_node| ranks.is_multiple_of(*per_node));
    let of_shape = |per_node: usize| {
        let nodes = ranks / per_node;
        let shape = NodeShape { nodes, per_node };
        [
            Algorithm::Hierarchical(shape),
            Algorithm::InterFirst(shape),
            Algorithm::Concurrent(shape),
            Algorithm::Levels(Levels::new(&[nodes, 1, per_node]).unwrap()),
        ]
    };
    [Algorithm::Direct, Algorithm::Ring(ranks)]
        .into_iter()
        .chain(shapes.flat_map(of_shape))
        .collect()
}

fn equal_exchange(world: &mut dyn Collectives, device: &Arc<dyn Device>, bytes: usize) {
    let (rank, ranks) = (world.rank(), world.size());
    let input: Vec<u8> = (0..ranks).flat_map(|q| part(rank, q, bytes)).collect();
    let expected: Vec<u8> = (0..ranks).flat_map(|p| part(p, rank, bytes)).collect();
    for algorithm in algorithms(ranks) {
        let from = slice(device, CommElement::U8, &input);
        let to = unset(device, CommElement::U8, ranks * bytes);
        let handle = world.all_to_all(&from, &to, algorithm, &call("equal"));
        handle.unwrap().wait().unwrap();
        assert!(
            read(device, &to) == expected,
            "{algorithm:?}, {bytes} bytes"
        );
        assert!(read(device, &from) == input, "the input was written");
    }
}

/// Blocks of rows go over intermediate ranks and return through the same ranks.
fn over_other_ranks(world: &mut dyn Collectives, device: &Arc<dyn Device>, row: usize) {
    const BLOCKS: usize = 2;
    let (rank, ranks) = (world.rank(), world.size());
    // Rank 1 has no rows for anybody.
    let rows = |from: usize, to: usize, block: usize| match from {
        1 => 0,
        _ => (from * 5 + to * 3 + block) % 3,
    };
    let pairs = || (0..BLOCKS).flat_map(|i| (0..ranks).map(move |peer| (peer, i)));
    let by_peer = (0..ranks).flat_map(|peer| (0..BLOCKS).map(move |i| (peer, i)));
    let units: Vec<u64> = by_peer.map(|(q, i)| rows(rank, q, i) as u64).collect();
    let bytes = |from, to, block| part(from + 17 * block, to, rows(from, to, block) * row);
    let transfers = |gets: bool, filled: bool| -> Vec<Transfer> {
        let transfer = |(peer, i): (usize, usize)| {
            let data = if gets {
                bytes(peer, rank, i)
            } else {
                bytes(rank, peer, i)
            };
            let data = if filled { data } else { vec![0xAB; data.len()] };
            let slice = slice(device, CommElement::U8, &data);
            (slice.bytes() > 0).then_some(Transfer { peer, slice })
        };
        pairs().filter_map(transfer).collect()
    };
    for algorithm in algorithms(ranks) {
        let hop_counts = world
            .exchange_counts(algorithm, BLOCKS, &units, &call("counts"))
            .unwrap();
        let expected = (0..ranks).flat_map(|p| (0..BLOCKS).map(move |i| rows(p, rank, i) as u64));
        assert!(
            hop_counts.received().iter().copied().eq(expected),
            "{algorithm:?}"
        );
        let scale = |block: RowBlock| block.units as usize * row;
        for back in [false, true] {
            let schedule = if back {
                hop_counts.back(&scale)
            } else {
                hop_counts.there(&scale)
            };
            let (sends, receives) = (transfers(back, true), transfers(!back, false));
            let begun = world.exchange_with(&sends, &receives, &schedule, &call("rows"));
            begun.unwrap().wait().unwrap();
            for (got, expected) in receives.iter().zip(transfers(!back, true)) {
                let same = read(device, &got.slice) == read(device, &expected.slice);
                assert!(same, "{algorithm:?}, back: {back}, from {}", got.peer);
            }
        }
    }
}

fn unequal_exchange(world: &mut dyn Collectives, device: &Arc<dyn Device>, scale: usize) {
    let (rank, ranks) = (world.rank(), world.size());
    // Rank 1 sends nothing, and no rank sends to the one before it.
    let count = |from: usize, to: usize| {
        if from == 1 || (to + 1) % ranks == from {
            0
        } else {
            scale * (1 + (from * 5 + to * 3) % 4)
        }
    };
    let sends: Vec<usize> = (0..ranks).map(|q| count(rank, q)).collect();
    let receives: Vec<usize> = (0..ranks).map(|p| count(p, rank)).collect();
    let input: Vec<u8> = (0..ranks)
        .flat_map(|q| part(rank, q, 4 * count(rank, q)))
        .collect();
    let expected: Vec<u8> = (0..ranks)
        .flat_map(|p| part(p, rank, 4 * count(p, rank)))
        .collect();
    for algorithm in algorithms(ranks) {
        let from = slice(device, CommElement::I32, &input);
        let to = unset(device, CommElement::I32, receives.iter().sum());
        let handle = world.all_to_all_v(&from, &sends, &to, &receives, algorithm, &call("counts"));
        handle.unwrap().wait().unwrap();
        assert!(
            read(device, &to) == expected,
            "{algorithm:?}, scale {scale}"
        );
    }
}

fn gather_and_broadcast(world: &mut dyn Collectives, device: &Arc<dyn Device>, bytes: usize) {
    let (rank, ranks) = (world.rank(), world.size());
    let expected: Vec<u8> = (0..ranks).flat_map(|p| part(p, 0, bytes)).collect();
    let to = unset(device, CommElement::U8, ranks * bytes);
    let from = slice(device, CommElement::U8, &part(rank, 0, bytes));
    world
        .all_gather(&from, &to, &call("gather"))
        .unwrap()
        .wait()
        .unwrap();
    assert!(read(device, &to) == expected, "{bytes} bytes");
    // In place.
    let place = unset(device, CommElement::U8, ranks * bytes);
    let own = Slice::new(place.buffer(), CommElement::U8, rank * bytes, bytes).unwrap();
    device
        .upload(&part(rank, 0, bytes), own.buffer(), own.offset())
        .unwrap();
    world
        .all_gather(&own, &place, &call("in place"))
        .unwrap()
        .wait()
        .unwrap();
    assert!(read(device, &place) == expected, "{bytes} bytes in place");
    gather_to_hosts(world, bytes);
    for root in 0..ranks {
        let data = slice(device, CommElement::U8, &part(rank, 9, bytes));
        world
            .broadcast(&data, root, &call("broadcast"))
            .unwrap()
            .wait()
            .unwrap();
        assert!(read(device, &data) == part(root, 9, bytes), "root {root}");
    }
}

/// Gathers equally many numbers of each rank, and bytes of any sizes.
fn gather_to_hosts(world: &mut dyn Collectives, most: usize) {
    let (rank, ranks) = (world.rank(), world.size());
    let numbers = |rank: usize| (0..most as u64).map(|i| i << 40 | rank as u64).collect();
    let all: Vec<Vec<u64>> = (0..ranks).map(numbers).collect();
    let found = world.gather_numbers(&all[rank], &call("numbers")).unwrap();
    assert!(found == all, "{most} numbers");
    let bytes = |rank: usize| part(rank, 3, most * rank / ranks);
    let all: Vec<Vec<u8>> = (0..ranks).map(bytes).collect();
    let found = world.gather_bytes(&all[rank], &call("bytes")).unwrap();
    assert!(found == all, "at most {most} bytes");
}

/// Returns values whose sum depends on the order.
fn value(rank: usize, i: usize) -> f32 {
    let sign = if (rank + i).is_multiple_of(2) {
        1.0
    } else {
        -1.0
    };
    sign * (1.0 + i as f32 / 7.0) * 10f32.powi((rank * 3 + i) as i32 % 9 - 3)
}

type Join = fn(f32, f32) -> f32;

fn reductions(world: &mut dyn Collectives, device: &Arc<dyn Device>, elements: usize) {
    let (rank, ranks) = (world.rank(), world.size());
    let join: [(Reduction, Join); 3] = [
        (Reduction::Sum, |a, b| a + b),
        (Reduction::Max, f32::max),
        (Reduction::Min, f32::min),
    ];
    for (reduction, join) in join {
        let total = |i: usize| (1..ranks).fold(value(0, i), |sum, p| join(sum, value(p, i)));
        let input = f32_bytes((0..elements).map(|i| value(rank, i)));
        let data = slice(device, CommElement::F32, &input);
        let to = unset(device, CommElement::F32, elements);
        let apart = world.all_reduce(&data, &to, reduction, &call("apart"));
        apart.unwrap().wait().unwrap();
        let expected = f32_bytes((0..elements).map(total));
        assert!(read(device, &to) == expected, "{reduction} of {elements}");
        let same = world.all_reduce(&data, &data, reduction, &call("in place"));
        same.unwrap().wait().unwrap();
        assert!(
            read(device, &data) == expected,
            "{reduction} of {elements} in place"
        );
        let input = f32_bytes((0..ranks * elements).map(|i| value(rank, i)));
        let data = slice(device, CommElement::F32, &input);
        let scattered = world.reduce_scatter(&data, &to, reduction, &call("scatter"));
        scattered.unwrap().wait().unwrap();
        let own = f32_bytes((rank * elements..(rank + 1) * elements).map(total));
        assert!(
            read(device, &to) == own,
            "{reduction} of {elements} scattered"
        );
        let counts: Vec<usize> = (0..ranks).map(|rank| elements * rank / 2).collect();
        let before: usize = counts[..rank].iter().sum();
        let all = counts.iter().sum();
        let data = slice(
            device,
            CommElement::F32,
            &f32_bytes((0..all).map(|i| value(rank, i))),
        );
        let to = unset(device, CommElement::F32, counts[rank]);
        let call = call("scatter unequally");
        let scattered = world.reduce_scatter_v(&data, &counts, &to, reduction, &call);
        scattered.unwrap().wait().unwrap();
        let own = f32_bytes((before..before + counts[rank]).map(total));
        assert!(read(device, &to) == own, "{reduction} of {counts:?}");
        let wrong = vec![elements; ranks + 1];
        let refused = world.reduce_scatter_v(&data, &wrong, &to, reduction, &call);
        assert!(matches!(refused, Err(CollectiveError::Invalid { .. })));
    }
    integers(world, device, elements);
}

fn integers(world: &mut dyn Collectives, device: &Arc<dyn Device>, elements: usize) {
    let (rank, ranks) = (world.rank(), world.size());
    let value = |rank: usize, i: usize| ((i as i64 - 3) * (rank as i64 + 1)) << 33;
    let input: Vec<u8> = (0..elements)
        .flat_map(|i| value(rank, i).to_ne_bytes())
        .collect();
    let data = slice(device, CommElement::I64, &input);
    let reduced = world.all_reduce(&data, &data, Reduction::Sum, &call("integers"));
    reduced.unwrap().wait().unwrap();
    let sum = |i: usize| (0..ranks).map(|p| value(p, i)).sum::<i64>();
    let expected: Vec<u8> = (0..elements).flat_map(|i| sum(i).to_ne_bytes()).collect();
    assert!(
        read(device, &data) == expected,
        "sums of {elements} integers"
    );
}

/// Sends two messages to the next rank, one of them empty, and one to oneself.
fn messages(world: &mut dyn Collectives, device: &Arc<dyn Device>) {
    let (rank, ranks) = (world.rank(), world.size());
    let (next, last) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let lengths = [9000, 0, 11];
    let transfer = |peer, slice| Transfer { peer, slice };
    let mut sends: Vec<Transfer> = lengths
        .iter()
        .map(|n| transfer(next, slice(device, CommElement::U8, &part(rank, next, *n))))
        .collect();
    let mut receives: Vec<Transfer> = lengths
        .iter()
        .map(|n| transfer(last, unset(device, CommElement::U8, *n)))
        .collect();
    sends.push(transfer(
        rank,
        slice(device, CommElement::F32, &part(rank, rank, 8)),
    ));
    receives.push(transfer(rank, unset(device, CommElement::F32, 2)));
    if ranks == 1 {
        // All are to oneself and keep their order.
        assert_eq!(next, rank);
    }
    world
        .exchange(&sends, &receives, &call("messages"))
        .unwrap()
        .wait()
        .unwrap();
    for (receive, bytes) in receives.iter().zip(lengths) {
        assert!(
            read(device, &receive.slice) == part(last, rank, bytes),
            "{bytes} bytes"
        );
    }
    assert_eq!(read(device, &receives[3].slice), part(rank, rank, 8));
}

/// Rows of four experts lie in one range here; on the next rank they lie apart and in another
/// order. They go there and return.
fn rows_apart(world: &mut dyn Collectives, device: &Arc<dyn Device>, scale: usize) {
    let (rank, size) = (world.rank(), world.size());
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    let sizes = [3 * scale, 0, scale, 2 * scale];
    let total: usize = sizes.iter().sum();
    let transfers = |peer, buffer: &Slice, places: [usize; 4]| -> Vec<Transfer> {
        let one = |(size, place)| Transfer {
            peer,
            slice: Slice::new(buffer.buffer(), CommElement::U8, place, size).unwrap(),
        };
        sizes.into_iter().zip(places).map(one).collect()
    };
    let row = [0, 3 * scale, 3 * scale, 4 * scale];
    let apart = [7 * scale, 6 * scale, 0, 2 * scale];
    let own = slice(device, CommElement::U8, &part(rank, 0, total));
    let (theirs, back) = (
        unset(device, CommElement::U8, 10 * scale),
        unset(device, CommElement::U8, total),
    );
    let (sends, receives) = (
        transfers(next, &own, row),
        transfers(before, &theirs, apart),
    );
    let call = call("rows apart");
    let there = world.exchange(&sends, &receives, &call).unwrap();
    there.wait().unwrap();
    let answers = transfers(next, &back, row);
    let back_again = world.exchange(&receives, &answers, &call).unwrap();
    back_again.wait().unwrap();
    assert!(read(device, &back) == part(rank, 0, total), "{scale}");
    // The gap between them was left alone.
    let gap = Slice::new(theirs.buffer(), CommElement::U8, scale, scale).unwrap();
    let whole = unset(device, CommElement::U8, scale);
    assert!(read(device, &gap) == read(device, &whole), "{scale}");
}

/// Several operations in flight together, finished in the other order.
fn several_at_once(world: &mut dyn Collectives, device: &Arc<dyn Device>) {
    let (rank, ranks) = (world.rank(), world.size());
    let mut started = Vec::new();
    for round in 0..5 {
        let bytes = 1 + round * 3000;
        let from = slice(device, CommElement::U8, &part(rank, round, bytes));
        let to = unset(device, CommElement::U8, ranks * bytes);
        let handle = world.all_gather(&from, &to, &call("together")).unwrap();
        assert_eq!(handle.sequence() + 1, world.sequence());
        started.push((handle, to, bytes, round));
    }
    for (handle, to, bytes, round) in started.into_iter().rev() {
        handle.wait().unwrap();
        let expected: Vec<u8> = (0..ranks).flat_map(|p| part(p, round, bytes)).collect();
        assert!(read(device, &to) == expected, "round {round}");
    }
}

/// Splits into ranks of equal parity, in reverse; groups and the world operate at the same time.
fn groups(world: &mut dyn Collectives, device: &Arc<dyn Device>) {
    let (rank, ranks) = (world.rank(), world.size());
    let parity = (rank % 2) as u32;
    let group = world
        .split(Some(parity), -(rank as i64), &call("split"))
        .unwrap();
    let mut group = group.expect("a rank with a colour has a group");
    let members: Vec<usize> = (0..ranks).rev().filter(|p| p % 2 == rank % 2).collect();
    assert_eq!(group.members(), members);
    assert_eq!(members[group.rank()], rank);
    let own = slice(device, CommElement::U8, &part(rank, 3, 6000));
    let (inner, outer) = (
        unset(device, CommElement::U8, 6000 * members.len()),
        unset(device, CommElement::U8, 6000 * ranks),
    );
    let one = group.all_gather(&own, &inner, &call("group")).unwrap();
    let two = world.all_gather(&own, &outer, &call("world")).unwrap();
    two.wait().unwrap();
    one.wait().unwrap();
    let expected: Vec<u8> = members.iter().flat_map(|p| part(*p, 3, 6000)).collect();
    assert!(read(device, &inner) == expected);
    // Some ranks have no colour.
    let some = world
        .split((rank > 0).then_some(0), 0, &call("some"))
        .unwrap();
    assert_eq!(some.is_some(), rank > 0);
    if let Some(mut some) = some {
        assert_eq!(some.members(), (1..ranks).collect::<Vec<_>>());
        some.barrier(&call("some")).unwrap().wait().unwrap();
    }
}
