//! Operations whose messages form trees.

use super::{BufferRef, CollectivePlan, Message, ScheduleStep, Span};

/// Copies the output of `root`, `bytes` bytes, to every other rank's. In round `k` the first
/// `2^k` ranks, counted from the root, each send to the rank `2^k` further on.
pub fn broadcast(rank: usize, size: usize, root: usize, bytes: usize) -> CollectivePlan {
    // Renumber the ranks so that the root is 0 and the tree is the same for every root.
    let place = (rank + size - root) % size;
    let span = Span::new(BufferRef::Output(0), 0..bytes);
    let peer = |place: usize| (place + root) % size;
    let mut steps = Vec::new();
    for round in 0..rounds(size) {
        let distance = 1 << round;
        let to = (place < distance && place + distance < size).then(|| peer(place + distance));
        let from = (distance..2 * distance)
            .contains(&place)
            .then(|| peer(place - distance));
        if to.or(from).is_some() {
            let message = |peer| Message { peer, span };
            steps.push(ScheduleStep::Exchange {
                phase: round,
                name: "tree",
                sends: to.into_iter().map(message).collect(),
                receives: from.into_iter().map(message).collect(),
                copies: Vec::new(),
            });
        }
    }
    CollectivePlan { scratch: 0, steps }
}

/// Returns only after every rank has called it. In round `k` each rank signals the rank `2^k`
/// further on (a dissemination barrier).
pub fn barrier(rank: usize, size: usize) -> CollectivePlan {
    let empty = Span::new(BufferRef::Scratch, 0..0);
    let message = |peer| Message { peer, span: empty };
    let round = |round: u32| {
        let distance = 1 << round;
        ScheduleStep::Exchange {
            phase: round,
            name: "round",
            sends: vec![message((rank + distance) % size)],
            receives: vec![message((rank + size - distance) % size)],
            copies: Vec::new(),
        }
    };
    CollectivePlan {
        scratch: 0,
        steps: (0..rounds(size)).map(round).collect(),
    }
}

/// Returns the number of doublings from 1 to at least `size`.
fn rounds(size: usize) -> u32 {
    size.next_power_of_two().trailing_zeros()
}
