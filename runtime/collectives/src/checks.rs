//! What can be known to be wrong before anything is sent.

use crate::api::{Algorithm, Transfer};
use crate::letter::Kind;
use crate::plan::Hops;
use crate::{CollectiveError, Slice};

type Checked<T = ()> = Result<T, CollectiveError>;

pub(crate) fn invalid(kind: Kind, reason: String) -> CollectiveError {
    CollectiveError::Invalid {
        operation: kind.name().to_string(),
        reason,
    }
}

fn require(kind: Kind, holds: bool, reason: impl FnOnce() -> String) -> Checked {
    if holds {
        Ok(())
    } else {
        Err(invalid(kind, reason()))
    }
}

/// Bytes that a rank sends to itself.
pub(crate) fn own_part(kind: Kind, sent: usize, expected: usize) -> Checked {
    require(kind, sent == expected, || {
        format!("this rank sends {sent} bytes to itself and expects {expected}")
    })
}

pub(crate) fn equal_types(kind: Kind, input: &Slice, output: &Slice) -> Checked {
    require(kind, input.element() == output.element(), || {
        let (a, b) = (input.element(), output.element());
        format!("the input is {a}, the output {b}; both must be of one type")
    })
}

pub(crate) fn equal_elements(kind: Kind, input: &Slice, output: &Slice) -> Checked {
    equal_types(kind, input, output)?;
    require(kind, input.elements() == output.elements(), || {
        let (a, b) = (input.elements(), output.elements());
        format!("the input has {a} elements, the output {b}; both must have as many")
    })
}

/// Elements of a rank's part.
pub(crate) fn parts(kind: Kind, slice: &Slice, size: usize) -> Checked<usize> {
    let elements = slice.elements();
    require(kind, elements.is_multiple_of(size), || {
        format!("{elements} elements cannot be cut into {size} equal parts, one for each rank")
    })?;
    Ok(elements / size)
}

pub(crate) fn whole_of_parts(
    kind: Kind,
    whole_name: &str,
    whole: &Slice,
    part_name: &str,
    part: &Slice,
    size: usize,
) -> Checked {
    let needed = part.elements() * size;
    require(kind, whole.elements() == needed, || {
        format!(
            "the {whole_name} has {} elements; with {} in the {part_name} and {size} ranks \
             it must have {needed}",
            whole.elements(),
            part.elements()
        )
    })
}

/// Elements of parts as bytes.
pub(crate) fn counts(
    kind: Kind,
    name: &str,
    counts: &[usize],
    slice: &Slice,
    size: usize,
) -> Checked<Vec<usize>> {
    require(kind, counts.len() == size, || {
        let given = counts.len();
        format!("{name} has {given} numbers; it must have one for each of the {size} ranks")
    })?;
    let sum = counts
        .iter()
        .try_fold(0usize, |sum, count| sum.checked_add(*count));
    require(kind, sum.is_some_and(|sum| sum <= slice.elements()), || {
        let has = slice.elements();
        format!("{name} adds up to more than the {has} elements of its slice")
    })?;
    let bytes = slice.element().size();
    Ok(counts.iter().map(|count| count * bytes).collect())
}

/// Bytes of the parts of a whole, of which the output is this rank's.
pub(crate) fn parts_by_counts(
    kind: Kind,
    numbers: &[usize],
    (whole, part): (&Slice, &Slice),
    (rank, size): (usize, usize),
) -> Checked<Vec<usize>> {
    let bytes = counts(kind, "counts", numbers, whole, size)?;
    require(kind, bytes.iter().sum::<usize>() == whole.bytes(), || {
        let (sum, has) = (numbers.iter().sum::<usize>(), whole.elements());
        format!("counts adds up to {sum}, the input has {has} elements; both must be equal")
    })?;
    require(kind, bytes[rank] == part.bytes(), || {
        let (count, has) = (numbers[rank], part.elements());
        format!("the output has {has} elements; of rank {rank} it must have {count}")
    })?;
    Ok(bytes)
}

pub(crate) fn apart(kind: Kind, input: &Slice, output: &Slice) -> Checked {
    require(kind, !input.overlaps(output), || {
        "the input and the output overlap; they must be apart".to_string()
    })
}

pub(crate) fn same_or_apart(kind: Kind, input: &Slice, output: &Slice) -> Checked {
    if input.address() == output.address() {
        return Ok(());
    }
    require(kind, !input.overlaps(output), || {
        "the input and the output overlap; they must be the same or apart".to_string()
    })
}

pub(crate) fn own_part_or_apart(kind: Kind, input: &Slice, output: &Slice, rank: usize) -> Checked {
    if input.address() == output.address() + (rank * input.bytes()) as u64 {
        return Ok(());
    }
    require(kind, !input.overlaps(output), || {
        format!("the input overlaps the output and is not its part {rank}")
    })
}

pub(crate) fn is_rank(kind: Kind, what: &str, rank: usize, size: usize) -> Checked {
    require(kind, rank < size, || {
        format!("{what} is rank {rank}; ranks go from 0 to {}", size - 1)
    })
}

/// The ways of an algorithm, whose nodes must be of the ranks of the group; `None` where
/// parts go straight.
pub(crate) fn algorithm(kind: Kind, algorithm: Algorithm, size: usize) -> Checked<Option<Hops>> {
    let Some(hops) = algorithm.hops() else {
        return Ok(None);
    };
    require(kind, hops.levels.ranks() == size, || {
        match hops.levels.count() {
            2 => {
                let (nodes, each) = (hops.levels.radix(0), hops.levels.radix(1));
                format!("{nodes} nodes of {each} ranks are not the {size} ranks of this group")
            }
            _ => format!(
                "levels of {} are not the {size} ranks of this group",
                hops.levels
            ),
        }
    })?;
    Ok(Some(hops))
}

/// Numbers that ranks tell each other: as many for each.
pub(crate) fn units(kind: Kind, pieces: usize, units: usize, size: usize) -> Checked {
    require(kind, pieces > 0 && units == pieces * size, || {
        format!("{units} numbers are not {pieces} for each of the {size} ranks")
    })
}

/// What this rank sends to itself must be what it receives from itself.
pub(crate) fn transfers(
    kind: Kind,
    rank: usize,
    size: usize,
    sends: &[Transfer],
    receives: &[Transfer],
) -> Checked {
    for transfer in sends.iter().chain(receives) {
        is_rank(kind, "a peer", transfer.peer, size)?;
    }
    let own = |list: &[Transfer]| -> Vec<usize> {
        let own = list.iter().filter(|transfer| transfer.peer == rank);
        own.map(|transfer| transfer.slice.bytes()).collect()
    };
    let (to, from) = (own(sends), own(receives));
    require(kind, to == from, || {
        format!("messages to this rank itself have {to:?} bytes, those from it {from:?}")
    })?;
    let overlaps = |receive: &Transfer| sends.iter().any(|s| s.slice.overlaps(&receive.slice));
    require(kind, !receives.iter().any(overlaps), || {
        "a message is received where another is sent from; they must be apart".to_string()
    })
}
