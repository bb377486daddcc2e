//! The split of a rendezvous message into MPI messages. It depends on the sizes of the parts
//! alone, so both sides split alike.
//!
//! MPI libraries send a small message eagerly, and ask the receiver before they send a large one
//! (Open MPI over TCP: from 64 KiB with its own header). The receiver's answer queues behind
//! everything that it is sending, so an exchange of messages slightly above that limit takes longer
//! than its bytes need. Messages up to a few times the limit are therefore sent eagerly, in several
//! MPI messages.

use crate::transport::MemoryRange;

/// The largest MPI message that libraries send eagerly, in bytes.
const AT_ONCE: usize = 60 << 10;
/// The largest rendezvous message that is split into eager MPI messages, in bytes. The library of
/// a late receiver has to buffer it; and the larger a message, the less the receiver's answer
/// matters.
const KEPT: usize = 1 << 20;
/// The average part size, in bytes, from which the parts of a larger rendezvous message are MPI
/// messages of their own. Below it they are one message of a derived datatype, which libraries
/// copy through small buffers.
const APART: usize = 64 << 10;

/// Returns the MPI messages of a rendezvous message, each as the ranges it covers, at most `most`
/// bytes each.
pub(super) fn messages(parts: &[MemoryRange], most: usize) -> Vec<Vec<MemoryRange>> {
    let total = MemoryRange::total(parts);
    if total <= KEPT {
        // Equal messages instead of full ones and a rest, so that none is needlessly small. An
        // empty rendezvous still is one message.
        let messages = total.div_ceil(AT_ONCE.min(most)).max(1);
        return in_equal(parts, total.div_ceil(messages).max(1));
    }
    // Many small parts: one message of a derived datatype costs less than a message for each.
    if parts.len() > 1 && total / parts.len() < APART && total <= most {
        return vec![parts.to_vec()];
    }
    parts
        .iter()
        .flat_map(|part| in_equal(std::slice::from_ref(part), most))
        .collect()
}

/// Returns messages of `bytes` bytes each, and one with the rest.
fn in_equal(parts: &[MemoryRange], bytes: usize) -> Vec<Vec<MemoryRange>> {
    let (mut list, mut message, mut left) = (Vec::new(), Vec::new(), bytes);
    for part in parts {
        let mut offset = 0;
        while offset < part.bytes {
            let covered = (part.bytes - offset).min(left);
            message.push(MemoryRange {
                address: part.address.wrapping_add(offset),
                bytes: covered,
            });
            (offset, left) = (offset + covered, left - covered);
            if left == 0 {
                list.push(std::mem::take(&mut message));
                left = bytes;
            }
        }
    }
    if !message.is_empty() {
        list.push(message);
    }
    list
}

/// Merges adjacent ranges.
pub(super) fn joined(parts: &[MemoryRange]) -> Vec<MemoryRange> {
    let mut list: Vec<MemoryRange> = Vec::new();
    for part in parts {
        match list.last_mut() {
            Some(last) if last.address.wrapping_add(last.bytes) == part.address => {
                last.bytes += part.bytes;
            }
            _ => list.push(*part),
        }
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(at: usize, bytes: usize) -> MemoryRange {
        MemoryRange {
            address: std::ptr::without_provenance_mut(at),
            bytes,
        }
    }

    fn read(list: &[MemoryRange]) -> Vec<(usize, usize)> {
        let one = |part: &MemoryRange| (part.address.addr(), part.bytes);
        list.iter().map(one).collect()
    }

    fn split(parts: &[MemoryRange], most: usize) -> Vec<Vec<(usize, usize)>> {
        messages(parts, most)
            .iter()
            .map(|list| read(list))
            .collect()
    }

    #[test]
    fn what_is_sent_at_once_is_split_where_it_has_to_be() {
        let small = [part(7, 4), part(90, 16), part(106, 5)];
        assert_eq!(split(&small, 1 << 30), [read(&small)]);
        assert_eq!(read(&joined(&small)), [(7, 4), (90, 21)]);
        assert_eq!(
            split(&small, 10),
            [
                vec![(7, 4), (90, 5)],
                vec![(95, 9)],
                vec![(104, 2), (106, 5)]
            ]
        );
        assert_eq!(split(&[part(8, AT_ONCE)], 1 << 30), [[(8, AT_ONCE)]]);
        let half = AT_ONCE / 2 + 1;
        let two = [vec![(0, half)], vec![(half, half - 1)]];
        assert_eq!(split(&[part(0, AT_ONCE + 1)], 1 << 30), two);
        assert_eq!(split(&[], 1 << 30), Vec::<Vec<_>>::new());
    }

    #[test]
    fn large_parts_are_messages_and_small_ones_go_together() {
        let large = [part(0, KEPT), part(1 << 40, 3 * KEPT)];
        let expected = [
            [(0, KEPT)],
            [(1 << 40, 2 * KEPT)],
            [((1 << 40) + 2 * KEPT, KEPT)],
        ];
        assert_eq!(split(&large, 2 * KEPT), expected);
        let many: Vec<MemoryRange> = (0..40).map(|i| part(i << 20, KEPT / 32)).collect();
        assert_eq!(split(&many, 1 << 30), [read(&many)]);
    }

    /// The two sides may have different addresses.
    #[test]
    fn messages_follow_from_sizes() {
        for sizes in [vec![1, 70_000, 3, 65_536], vec![KEPT - 5, 5], vec![KEPT, 1]] {
            let lie = |apart: usize| -> Vec<Vec<usize>> {
                let at = |i: usize| sizes[..i].iter().sum::<usize>() + i * apart;
                let parts: Vec<MemoryRange> =
                    (0..sizes.len()).map(|i| part(at(i), sizes[i])).collect();
                let bytes = |list: &Vec<MemoryRange>| list.iter().map(|part| part.bytes).collect();
                messages(&parts, 1 << 30).iter().map(bytes).collect()
            };
            assert_eq!(lie(0), lie(1 << 22));
            assert_eq!(
                lie(0).concat().iter().sum::<usize>(),
                sizes.iter().sum::<usize>()
            );
        }
    }
}
