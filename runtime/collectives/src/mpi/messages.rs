//! The messages of a rendezvous message, which follow from its sizes alone: both sides have the same.
//!
//! Libraries send a small message at once, and ask before a large one whether it is waited for
//! (Open MPI over TCP: 64 KiB with what it adds). The answer comes behind everything that the
//! other rank sends, so that an exchange of messages somewhat larger takes a quarter longer
//! than its bytes do. Rendezvous messages that are not much larger go at once, in several messages.

use crate::transport::MemoryRange;

/// Bytes of a message that libraries send at once.
const AT_ONCE: usize = 60 << 10;
/// Bytes of a rendezvous message that goes so. A rank that is late keeps it in the library's memory; and of
/// a larger one the question is a small part.
const KEPT: usize = 1 << 20;
/// Bytes from which parts of a larger rendezvous message, on average, are messages of their own: libraries
/// copy what lies apart through small buffers.
const APART: usize = 64 << 10;

/// The messages of a rendezvous message, each of the parts that it lists, at most `most` bytes.
pub(super) fn messages(parts: &[MemoryRange], most: usize) -> Vec<Vec<MemoryRange>> {
    let total = MemoryRange::total(parts);
    if total <= KEPT {
        let messages = total.div_ceil(AT_ONCE.min(most)).max(1);
        return in_equal(parts, total.div_ceil(messages).max(1));
    }
    if parts.len() > 1 && total / parts.len() < APART && total <= most {
        return vec![parts.to_vec()];
    }
    parts
        .iter()
        .flat_map(|part| in_equal(std::slice::from_ref(part), most))
        .collect()
}

/// Messages of so many bytes, and one of what is left.
fn in_equal(parts: &[MemoryRange], bytes: usize) -> Vec<Vec<MemoryRange>> {
    let (mut list, mut message, mut room) = (Vec::new(), Vec::new(), bytes);
    for part in parts {
        let mut offset = 0;
        while offset < part.bytes {
            let taken = (part.bytes - offset).min(room);
            message.push(MemoryRange {
                address: part.address.wrapping_add(offset),
                bytes: taken,
            });
            (offset, room) = (offset + taken, room - taken);
            if room == 0 {
                list.push(std::mem::take(&mut message));
                room = bytes;
            }
        }
    }
    if !message.is_empty() {
        list.push(message);
    }
    list
}

/// Those that follow each other as one.
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

    fn cut(parts: &[MemoryRange], most: usize) -> Vec<Vec<(usize, usize)>> {
        messages(parts, most)
            .iter()
            .map(|list| read(list))
            .collect()
    }

    #[test]
    fn what_is_sent_at_once_is_cut_where_it_has_to_be() {
        let small = [part(7, 4), part(90, 16), part(106, 5)];
        assert_eq!(cut(&small, 1 << 30), [read(&small)]);
        assert_eq!(read(&joined(&small)), [(7, 4), (90, 21)]);
        assert_eq!(
            cut(&small, 10),
            [
                vec![(7, 4), (90, 5)],
                vec![(95, 9)],
                vec![(104, 2), (106, 5)]
            ]
        );
        assert_eq!(cut(&[part(8, AT_ONCE)], 1 << 30), [[(8, AT_ONCE)]]);
        let half = AT_ONCE / 2 + 1;
        let two = [vec![(0, half)], vec![(half, half - 1)]];
        assert_eq!(cut(&[part(0, AT_ONCE + 1)], 1 << 30), two);
        assert_eq!(cut(&[], 1 << 30), Vec::<Vec<_>>::new());
    }

    #[test]
    fn large_parts_are_messages_and_small_ones_go_together() {
        let large = [part(0, KEPT), part(1 << 40, 3 * KEPT)];
        let expected = [
            [(0, KEPT)],
            [(1 << 40, 2 * KEPT)],
            [((1 << 40) + 2 * KEPT, KEPT)],
        ];
        assert_eq!(cut(&large, 2 * KEPT), expected);
        let many: Vec<MemoryRange> = (0..40).map(|i| part(i << 20, KEPT / 32)).collect();
        assert_eq!(cut(&many, 1 << 30), [read(&many)]);
    }

    /// Both sides may have them anywhere.
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
            assert_eq!(lie(0).concat().iter().sum::<usize>(), sizes.iter().sum());
        }
    }
}
