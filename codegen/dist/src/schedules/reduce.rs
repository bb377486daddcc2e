//! Reductions: each part is gathered on one rank, which folds the rows in rank order. So
//! one-phase and two-phase reductions give the same bytes, whatever arrives first.

use super::{BufferRef, CollectivePlan, Copy, Message, ScheduleStep, Span, offsets, others};
use super::{CommElement, Reduction};

/// The largest all-reduce in which every rank sends its whole input to every other: one phase
/// instead of two.
pub const ONE_PHASE_BYTES: usize = 2048;

/// Folds part `q` of all inputs, `sizes[q]` bytes, into rank `q`'s output.
pub fn reduce_scatter(
    rank: usize,
    sizes: &[usize],
    element: CommElement,
    reduction: Reduction,
) -> CollectivePlan {
    let (gather, fold) = scatter_steps(rank, sizes, element, reduction, 0);
    CollectivePlan {
        scratch: sizes[rank] * sizes.len(),
        steps: vec![gather, fold],
    }
}

/// Folds all inputs, `bytes` bytes each, into every rank's output.
pub fn all_reduce(
    rank: usize,
    size: usize,
    bytes: usize,
    element: CommElement,
    reduction: Reduction,
) -> CollectivePlan {
    // For small inputs, the second phase costs more latency than the additional bytes of the
    // first.
    if bytes <= ONE_PHASE_BYTES || size == 1 {
        return all_to_everybody(rank, size, bytes, element, reduction);
    }
    // Parts end at element boundaries, because each is folded by one rank alone.
    let sizes = even_parts(bytes / element.size(), size, element.size());
    let starts = offsets(&sizes);
    let (gather, fold) = scatter_steps(rank, &sizes, element, reduction, starts[rank]);
    let part = |peer: usize, of: usize| Message {
        peer,
        span: Span::new(BufferRef::Output(0), starts[of]..starts[of + 1]),
    };
    let spread = ScheduleStep::Exchange {
        phase: 1,
        name: "spread",
        sends: others(rank, size).map(|peer| part(peer, rank)).collect(),
        receives: others(rank, size).map(|peer| part(peer, peer)).collect(),
        copies: Vec::new(),
    };
    CollectivePlan {
        scratch: sizes[rank] * size,
        steps: vec![gather, fold, spread],
    }
}

/// Returns the bytes of each rank's part; parts differ by one element at most.
fn even_parts(elements: usize, size: usize, element_bytes: usize) -> Vec<usize> {
    let part = |rank| elements / size + usize::from(rank < elements % size);
    (0..size).map(|rank| part(rank) * element_bytes).collect()
}

/// Returns the steps that gather every rank's part for this rank in scratch, one row per rank,
/// and fold them to byte `offset` of the output.
fn scatter_steps(
    rank: usize,
    sizes: &[usize],
    element: CommElement,
    reduction: Reduction,
    offset: usize,
) -> (ScheduleStep, ScheduleStep) {
    let (size, row_bytes) = (sizes.len(), sizes[rank]);
    let starts = offsets(sizes);
    let row = |peer: usize| Span::new(BufferRef::Scratch, peer * row_bytes..(peer + 1) * row_bytes);
    let part = |peer: usize| Span::new(BufferRef::Input(0), starts[peer]..starts[peer + 1]);
    let message = |peer, span| Message { peer, span };
    let gather = ScheduleStep::Exchange {
        phase: 0,
        name: "gather",
        sends: others(rank, size).map(|p| message(p, part(p))).collect(),
        receives: others(rank, size).map(|p| message(p, row(p))).collect(),
        copies: vec![Copy {
            from: part(rank),
            to: BufferRef::Scratch,
            offset: rank * row_bytes,
        }],
    };
    let fold = ScheduleStep::Reduce {
        element,
        reduction,
        rows: 0..row_bytes * size,
        row_bytes,
        to: BufferRef::Output(0),
        offset,
    };
    (gather, fold)
}

fn all_to_everybody(
    rank: usize,
    size: usize,
    bytes: usize,
    element: CommElement,
    reduction: Reduction,
) -> CollectivePlan {
    let own = Span::new(BufferRef::Input(0), 0..bytes);
    let row = |peer: usize| Span::new(BufferRef::Scratch, peer * bytes..(peer + 1) * bytes);
    let message = |peer, span| Message { peer, span };
    let gather = ScheduleStep::Exchange {
        phase: 0,
        name: "gather",
        sends: others(rank, size).map(|p| message(p, own)).collect(),
        receives: others(rank, size).map(|p| message(p, row(p))).collect(),
        copies: vec![Copy {
            from: own,
            to: BufferRef::Scratch,
            offset: rank * bytes,
        }],
    };
    let fold = ScheduleStep::Reduce {
        element,
        reduction,
        rows: 0..bytes * size,
        row_bytes: bytes,
        to: BufferRef::Output(0),
        offset: 0,
    };
    CollectivePlan {
        scratch: bytes * size,
        steps: vec![gather, fold],
    }
}
