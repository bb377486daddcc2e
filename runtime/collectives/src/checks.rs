//! What can be known to be wrong before anything is sent.

use crate::api::{Algorithm, Transfer};
use crate::eager::Kind;
use crate::plan::HopOrder;
use crate::{CollectiveError, Slice};

type Checked<T = ()> = Result<T, CollectiveError>;

/// A rank, and how many there are.
type Own = (usize, usize);

/// Bytes of a part, and the ways that parts go.
pub(crate) fn all_to_all(
    input: &Slice,
    output: &Slice,
    way: Algorithm,
    size: usize,
) -> Checked<(usize, Option<HopOrder>)> {
    let kind = Kind::AllToAll;
    equal_elements(kind, input, output)?;
    apart(kind, input, output)?;
    let part = parts(kind, input, size)? * input.element().size();
    Ok((part, algorithm(kind, way, size)?))
}

/// What is sent to each rank and received from each, in bytes, and the ways that it goes.
pub(crate) struct Counted {
    pub sends: Vec<usize>,
    pub receives: Vec<usize>,
    pub hops: Option<HopOrder>,
}

/// Both sides: a slice, and elements for each rank.
pub(crate) fn all_to_all_v(
    (input, sends): (&Slice, &[usize]),
    (output, receives): (&Slice, &[usize]),
    way: Algorithm,
    (rank, size): Own,
) -> Checked<Counted> {
    let kind = Kind::AllToAllByCounts;
    equal_types(kind, input, output)?;
    apart(kind, input, output)?;
    let sends = counts(kind, "sends", sends, input, size)?;
    let receives = counts(kind, "receives", receives, output, size)?;
    own_part(kind, sends[rank], receives[rank])?;
    let hops = algorithm(kind, way, size)?;
    Ok(Counted {
        sends,
        receives,
        hops,
    })
}

pub(crate) fn all_gather(input: &Slice, output: &Slice, (rank, size): Own) -> Checked {
    let kind = Kind::AllGather;
    equal_types(kind, input, output)?;
    whole_of_parts(kind, "output", output, "input", input, size)?;
    own_part_or_apart(kind, input, output, rank)
}

/// Elements of each rank's part, which are as many for each.
pub(crate) fn reduce_scatter(input: &Slice, output: &Slice, size: usize) -> Checked<Vec<usize>> {
    let kind = Kind::ReduceScatter;
    equal_types(kind, input, output)?;
    whole_of_parts(kind, "input", input, "output", output, size)?;
    Ok(vec![output.elements(); size])
}

/// Bytes of each rank's part.
pub(crate) fn reduce_scatter_v(
    input: &Slice,
    counts: &[usize],
    output: &Slice,
    own: Own,
) -> Checked<Vec<usize>> {
    let kind = Kind::ReduceScatter;
    equal_types(kind, input, output)?;
    parts_by_counts(kind, counts, (input, output), own)
}

pub(crate) fn all_reduce(input: &Slice, output: &Slice) -> Checked {
    let kind = Kind::AllReduce;
    equal_elements(kind, input, output)?;
    same_or_apart(kind, input, output)
}

pub(crate) fn broadcast(root: usize, size: usize) -> Checked {
    is_rank(Kind::Broadcast, "the root", root, size)
}

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
fn own_part(kind: Kind, sent: usize, expected: usize) -> Checked {
    require(kind, sent == expected, || {
        format!("this rank sends {sent} bytes to itself and expects {expected}")
    })
}

fn equal_types(kind: Kind, input: &Slice, output: &Slice) -> Checked {
    require(kind, input.element() == output.element(), || {
        let (a, b) = (input.element(), output.element());
        format!("the input is {a}, the output {b}; both must be of one type")
    })
}

fn equal_elements(kind: Kind, input: &Slice, output: &Slice) -> Checked {
    equal_types(kind, input, output)?;
    require(kind, input.elements() == output.elements(), || {
        let (a, b) = (input.elements(), output.elements());
        format!("the input has {a} elements, the output {b}; both must have as many")
    })
}

/// Elements of a rank's part.
fn parts(kind: Kind, slice: &Slice, size: usize) -> Checked<usize> {
    let elements = slice.elements();
    require(kind, elements.is_multiple_of(size), || {
        format!("{elements} elements cannot be cut into {size} equal parts, one for each rank")
    })?;
    Ok(elements / size)
}

fn whole_of_parts(
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
fn counts(
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
fn parts_by_counts(
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

fn apart(kind: Kind, input: &Slice, output: &Slice) -> Checked {
    require(kind, !input.overlaps(output), || {
        "the input and the output overlap; they must be apart".to_string()
    })
}

fn same_or_apart(kind: Kind, input: &Slice, output: &Slice) -> Checked {
    if input.address() == output.address() {
        return Ok(());
    }
    require(kind, !input.overlaps(output), || {
        "the input and the output overlap; they must be the same or apart".to_string()
    })
}

fn own_part_or_apart(kind: Kind, input: &Slice, output: &Slice, rank: usize) -> Checked {
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
pub(crate) fn algorithm(
    kind: Kind,
    algorithm: Algorithm,
    size: usize,
) -> Checked<Option<HopOrder>> {
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
