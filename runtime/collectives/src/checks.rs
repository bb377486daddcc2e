//! Argument checks before anything is sent.

use crate::api::Transfer;
use crate::eager::OpKind;
use crate::schedules::Algorithm;
use crate::schedules::{GroupRank, HopOrder};
use crate::{CollectiveError, InvalidReason, Slice};

type Checked<T = ()> = Result<T, CollectiveError>;

/// A buffer with one part for each rank.
pub(crate) struct Parts<'a> {
    pub slice: &'a Slice,
    /// The elements of each rank's part.
    pub counts: &'a [usize],
}

/// Returns the bytes of a part and the hop order.
pub(crate) fn all_to_all(
    input: &Slice,
    output: &Slice,
    by: Algorithm,
    size: usize,
) -> Checked<(usize, Option<HopOrder>)> {
    let kind = OpKind::AllToAll;
    equal_elements(kind, input, output)?;
    apart(kind, input, output)?;
    let part = parts(kind, input, size)? * input.element().size();
    Ok((part, algorithm(kind, by, size)?))
}

/// The bytes to and from each rank, and the hop order.
pub(crate) struct Counted {
    pub sends: Vec<usize>,
    pub receives: Vec<usize>,
    pub hops: Option<HopOrder>,
}

pub(crate) fn all_to_all_v(
    input: Parts<'_>,
    output: Parts<'_>,
    by: Algorithm,
    GroupRank { rank, size }: GroupRank,
) -> Checked<Counted> {
    let kind = OpKind::AllToAllByCounts;
    let (sends, receives) = (input.counts, output.counts);
    let (input, output) = (input.slice, output.slice);
    equal_types(kind, input, output)?;
    apart(kind, input, output)?;
    let sends = counts(kind, "sends", sends, input, size)?;
    let receives = counts(kind, "receives", receives, output, size)?;
    own_part(kind, sends[rank], receives[rank])?;
    let hops = algorithm(kind, by, size)?;
    Ok(Counted {
        sends,
        receives,
        hops,
    })
}

pub(crate) fn all_gather(input: &Slice, output: &Slice, own: GroupRank) -> Checked {
    let kind = OpKind::AllGather;
    equal_types(kind, input, output)?;
    whole_of_parts(kind, "output", output, "input", input, own.size)?;
    own_part_or_apart(kind, input, output, own.rank)
}

/// Returns the elements of each rank's part, which are equal.
pub(crate) fn reduce_scatter(input: &Slice, output: &Slice, size: usize) -> Checked<Vec<usize>> {
    let kind = OpKind::ReduceScatter;
    equal_types(kind, input, output)?;
    whole_of_parts(kind, "input", input, "output", output, size)?;
    Ok(vec![output.elements(); size])
}

/// Returns the bytes of each rank's part.
pub(crate) fn reduce_scatter_v(
    input: &Slice,
    counts: &[usize],
    output: &Slice,
    own: GroupRank,
) -> Checked<Vec<usize>> {
    let kind = OpKind::ReduceScatter;
    equal_types(kind, input, output)?;
    parts_by_counts(kind, counts, (input, output), own)
}

pub(crate) fn all_reduce(input: &Slice, output: &Slice) -> Checked {
    let kind = OpKind::AllReduce;
    equal_elements(kind, input, output)?;
    same_or_apart(kind, input, output)
}

pub(crate) fn broadcast(root: usize, size: usize) -> Checked {
    is_rank(OpKind::Broadcast, "the root", root, size)
}

pub(crate) fn invalid(kind: OpKind, reason: impl Into<InvalidReason>) -> CollectiveError {
    CollectiveError::Invalid {
        operation: kind.name().to_string(),
        reason: reason.into(),
    }
}

fn require(kind: OpKind, holds: bool, reason: impl FnOnce() -> String) -> Checked {
    if holds {
        Ok(())
    } else {
        Err(invalid(kind, reason()))
    }
}

/// Checks that a rank sends itself as many bytes as it expects.
fn own_part(kind: OpKind, sent: usize, expected: usize) -> Checked {
    require(kind, sent == expected, || {
        format!("this rank sends {sent} bytes to itself and expects {expected}")
    })
}

fn equal_types(kind: OpKind, input: &Slice, output: &Slice) -> Checked {
    require(kind, input.element() == output.element(), || {
        let (a, b) = (input.element(), output.element());
        format!("the input is {a}, the output {b}; both must be of one type")
    })
}

fn equal_elements(kind: OpKind, input: &Slice, output: &Slice) -> Checked {
    equal_types(kind, input, output)?;
    require(kind, input.elements() == output.elements(), || {
        let (a, b) = (input.elements(), output.elements());
        format!("the input has {a} elements, the output {b}; both must have as many")
    })
}

/// Returns the elements of a rank's part.
fn parts(kind: OpKind, slice: &Slice, size: usize) -> Checked<usize> {
    let elements = slice.elements();
    require(kind, elements.is_multiple_of(size), || {
        format!("{elements} elements cannot be split into {size} equal parts, one for each rank")
    })?;
    Ok(elements / size)
}

fn whole_of_parts(
    kind: OpKind,
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

/// Returns the sizes of the parts in bytes.
fn counts(
    kind: OpKind,
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

/// Returns the bytes of each part of the whole; the output holds this rank's.
fn parts_by_counts(
    kind: OpKind,
    numbers: &[usize],
    (whole, part): (&Slice, &Slice),
    GroupRank { rank, size }: GroupRank,
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

fn apart(kind: OpKind, input: &Slice, output: &Slice) -> Checked {
    require(kind, !input.overlaps(output), || {
        "the input and the output overlap; they must be apart".to_string()
    })
}

fn same_or_apart(kind: OpKind, input: &Slice, output: &Slice) -> Checked {
    if input.address() == output.address() {
        return Ok(());
    }
    require(kind, !input.overlaps(output), || {
        "the input and the output overlap; they must be the same or apart".to_string()
    })
}

fn own_part_or_apart(kind: OpKind, input: &Slice, output: &Slice, rank: usize) -> Checked {
    if input.address() == output.address() + (rank * input.bytes()) as u64 {
        return Ok(());
    }
    require(kind, !input.overlaps(output), || {
        format!("the input overlaps the output and is not its part {rank}")
    })
}

pub(crate) fn is_rank(kind: OpKind, what: &str, rank: usize, size: usize) -> Checked {
    require(kind, rank < size, || {
        format!("{what} is rank {rank}; ranks go from 0 to {}", size - 1)
    })
}

/// Returns the hop order of an algorithm, whose nodes must cover the ranks of the group; `None`
/// for direct messages.
pub(crate) fn algorithm(
    kind: OpKind,
    algorithm: Algorithm,
    size: usize,
) -> Checked<Option<HopOrder>> {
    let Some(hops) = algorithm.hops() else {
        return Ok(None);
    };
    require(kind, hops.ranks() == size, || match hops.levels.count() {
        2 => {
            let (nodes, each) = (hops.levels.radix(0), hops.levels.radix(1));
            format!("{nodes} nodes of {each} ranks are not the {size} ranks of this group")
        }
        1 => format!("{} ranks are not the {size} of this group", hops.ranks()),
        _ => format!(
            "levels of {} are not the {size} ranks of this group",
            hops.levels
        ),
    })?;
    Ok(Some(hops))
}

/// Checks the length of the list of a count exchange: `blocks` numbers for each rank.
pub(crate) fn units(kind: OpKind, blocks_per_peer: usize, units: usize, size: usize) -> Checked {
    require(
        kind,
        blocks_per_peer > 0 && units == blocks_per_peer * size,
        || format!("{units} numbers are not {blocks_per_peer} for each of the {size} ranks"),
    )
}

/// Checks the messages of an exchange. The messages that a rank sends to itself must match those
/// that it receives from itself.
pub(crate) fn transfers(
    kind: OpKind,
    GroupRank { rank, size }: GroupRank,
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
