//! Eager messages: each announces one message of an operation and carries the operation's whole
//! signature, so ranks that call different operations find out before any memory is written.

use crate::schedules::HopOrder;
use crate::transport::MAX_EAGER_BYTES;
use crate::{CommElement, Reduction};

// "moe" and the version of the format. Change the last byte with the layout, so that ranks of
// different versions reject each other's messages.
const MAGIC: u32 = 0x6d6f_6505;
const HEAD: usize = 116;
const LABEL: usize = 32;

/// The largest payload that an eager message carries itself, in bytes.
pub const INLINE_BYTES: usize = MAX_EAGER_BYTES - HEAD;

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum OpKind {
    AllToAll = 1,
    AllToAllByCounts = 2,
    AllGather = 3,
    ReduceScatter = 4,
    AllReduce = 5,
    Broadcast = 6,
    Exchange = 7,
    Barrier = 8,
    Split = 9,
    Agree = 10,
    Graph = 11,
}

impl OpKind {
    const ALL: [OpKind; 11] = [
        OpKind::AllToAll,
        OpKind::AllToAllByCounts,
        OpKind::AllGather,
        OpKind::ReduceScatter,
        OpKind::AllReduce,
        OpKind::Broadcast,
        OpKind::Exchange,
        OpKind::Barrier,
        OpKind::Split,
        OpKind::Agree,
        OpKind::Graph,
    ];

    pub fn name(self) -> &'static str {
        match self {
            OpKind::AllToAll => "all_to_all",
            OpKind::AllToAllByCounts => "all_to_all_v",
            OpKind::AllGather => "all_gather",
            OpKind::ReduceScatter => "reduce_scatter",
            OpKind::AllReduce => "all_reduce",
            OpKind::Broadcast => "broadcast",
            OpKind::Exchange => "exchange",
            OpKind::Barrier => "barrier",
            OpKind::Split => "split",
            OpKind::Agree => "agree",
            OpKind::Graph => "graph",
        }
    }
}

/// The properties of an operation that must be equal on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    pub kind: OpKind,
    pub element: Option<CommElement>,
    pub reduction: Option<Reduction>,
    /// The hop order as a [`HopOrder::code`]; 0 for direct messages.
    pub hop_code: u64,
    pub root: u32,
    /// The number of elements; 0 where ranks may differ.
    pub elements: u64,
    /// The first bytes of the caller's label.
    pub label: String,
}

/// The first difference between what two ranks say of one message.
#[derive(Debug, PartialEq, Eq)]
pub struct Difference {
    /// The thing that differs.
    pub what: &'static str,
    pub ours: String,
    pub theirs: String,
}

impl Signature {
    pub fn of(kind: OpKind, label: &str) -> Signature {
        let mut end = label.len().min(LABEL);
        while !label.is_char_boundary(end) {
            end -= 1;
        }
        Signature {
            kind,
            element: None,
            reduction: None,
            hop_code: 0,
            root: 0,
            elements: 0,
            label: label[..end].to_string(),
        }
    }

    /// Returns the name and both values of the first field that differs.
    pub fn difference(&self, other: &Signature) -> Option<Difference> {
        if self == other {
            return None;
        }
        let both = self.fields().into_iter().zip(other.fields());
        both.map(|((what, ours), (_, theirs))| Difference { what, ours, theirs })
            .find(|one| one.ours != one.theirs)
    }

    fn fields(&self) -> [(&'static str, String); 7] {
        let element = self.element.map_or("none", CommElement::name);
        let reduction = self.reduction.map_or("none", Reduction::name);
        [
            ("the operation", format!("`{}`", self.kind.name())),
            ("the label", format!("`{}`", self.label)),
            ("the element type", element.to_string()),
            ("the reduction", reduction.to_string()),
            ("the number of elements", self.elements.to_string()),
            ("the root", self.root.to_string()),
            ("the algorithm", HopOrder::words(self.hop_code)),
        ]
    }
}

/// The message that an eager message announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MessageKey {
    /// The group.
    pub context: u64,
    pub sequence: u64,
    pub phase: u32,
    /// The sender, in the world.
    pub from: u32,
}

/// The messages of one phase from one rank to another, which are sent together. Sender and
/// receiver must expect the same ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartSizes {
    /// The number of messages.
    pub count: u32,
    /// Their bytes together.
    pub bytes: u64,
    /// A hash of the individual sizes, where there are several messages.
    pub sizes: u64,
}

impl PartSizes {
    pub fn of(sizes: impl Iterator<Item = u64> + Clone) -> PartSizes {
        let count = sizes.clone().count();
        PartSizes {
            count: count as u32,
            bytes: sizes.clone().sum(),
            sizes: match count {
                0 | 1 => 0,
                _ => crate::hash::of_numbers(sizes),
            },
        }
    }

    /// Returns the name and both values of the first property that differs.
    pub fn difference(&self, other: &PartSizes) -> Option<Difference> {
        let numbers = |what, ours: u64, theirs: u64| {
            (ours != theirs).then(|| Difference {
                what,
                ours: ours.to_string(),
                theirs: theirs.to_string(),
            })
        };
        let count = numbers(
            "the number of messages",
            self.count.into(),
            other.count.into(),
        );
        let bytes = numbers(
            "the number of bytes from there to here",
            self.bytes,
            other.bytes,
        );
        let sizes = (self.sizes != other.sizes).then(|| Difference {
            what: "the sizes of messages",
            ours: "as received".to_string(),
            theirs: "others".to_string(),
        });
        count.or(bytes).or(sizes)
    }
}

/// The place of a message's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessageBody {
    /// Inside the eager message.
    Inline(Vec<u8>),
    /// In a rendezvous message with this tag.
    Rendezvous { tag: u32 },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EagerMessage {
    Message {
        key: MessageKey,
        signature: Signature,
        sizes: PartSizes,
        body: MessageBody,
    },
    /// The sender has given up, for this reason.
    Failure { from: u32, reason: String },
}

impl EagerMessage {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD);
        out.extend(MAGIC.to_le_bytes());
        match self {
            EagerMessage::Failure { from, reason } => {
                out.extend(0u32.to_le_bytes());
                out.extend(from.to_le_bytes());
                let mut end = reason.len().min(INLINE_BYTES);
                // Never cut a multi-byte character in half.
                while !reason.is_char_boundary(end) {
                    end -= 1;
                }
                out.extend(&reason.as_bytes()[..end]);
            }
            EagerMessage::Message {
                key,
                signature,
                sizes,
                body,
            } => encode_message(&mut out, key, signature, sizes, body),
        }
        out
    }

    /// Returns `None` for bytes that no rank of this version writes.
    pub fn decode(bytes: &[u8]) -> Option<EagerMessage> {
        let mut reader = Reader(bytes);
        if reader.u32()? != MAGIC {
            return None;
        }
        if reader.u32()? == 0 {
            let from = reader.u32()?;
            let reason = String::from_utf8_lossy(reader.0).into_owned();
            return Some(EagerMessage::Failure { from, reason });
        }
        decode_message(reader)
    }
}

fn encode_message(
    out: &mut Vec<u8>,
    key: &MessageKey,
    signature: &Signature,
    sizes: &PartSizes,
    body: &MessageBody,
) {
    let (tag, inline) = match body {
        MessageBody::Inline(_) => (0, 1u32),
        MessageBody::Rendezvous { tag } => (*tag, 0),
    };
    out.extend(1u32.to_le_bytes());
    let large = [key.context, key.sequence, sizes.bytes, signature.elements];
    for number in large.into_iter().chain([signature.hop_code]) {
        out.extend(number.to_le_bytes());
    }
    let small = [key.phase, key.from, sizes.count, tag, inline];
    for number in small.into_iter().chain([signature.root]) {
        out.extend(number.to_le_bytes());
    }
    out.push(signature.kind as u8);
    out.push(signature.element.map_or(0, |e| e as u8));
    out.push(signature.reduction.map_or(0, |r| r as u8));
    out.push(signature.label.len() as u8);
    let mut label = [0; LABEL];
    label[..signature.label.len()].copy_from_slice(signature.label.as_bytes());
    out.extend(label);
    out.extend(sizes.sizes.to_le_bytes());
    if let MessageBody::Inline(data) = body {
        out.extend(data);
    }
}

fn decode_message(mut reader: Reader<'_>) -> Option<EagerMessage> {
    let [context, sequence, bytes, elements, hop_code] = reader.array(Reader::u64)?;
    let [phase, from, count, tag, inline, root] = reader.array(Reader::u32)?;
    let [kind, element, reduction, length] = reader.array(Reader::u8)?;
    let label = String::from_utf8_lossy(reader.take(LABEL)?.get(..length as usize)?).into_owned();
    let sizes = reader.u64()?;
    let body = match inline {
        0 => MessageBody::Rendezvous { tag },
        // A truncated payload is rejected here, before its length is trusted anywhere else.
        _ if reader.0.len() as u64 == bytes => MessageBody::Inline(reader.0.to_vec()),
        _ => return None,
    };
    let signature = Signature {
        kind: OpKind::ALL.into_iter().find(|k| *k as u8 == kind)?,
        element: CommElement::from_code(element),
        reduction: Reduction::from_code(reduction),
        hop_code,
        root,
        elements,
        label,
    };
    let key = MessageKey {
        context,
        sequence,
        phase,
        from,
    };
    let sizes = PartSizes {
        count,
        bytes,
        sizes,
    };
    Some(EagerMessage::Message {
        key,
        signature,
        sizes,
        body,
    })
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(head)
    }

    fn u8(&mut self) -> Option<u8> {
        Some(self.take(1)?[0])
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn array<T: Copy + Default, const N: usize>(
        &mut self,
        one: fn(&mut Self) -> Option<T>,
    ) -> Option<[T; N]> {
        let mut list = [T::default(); N];
        for item in &mut list {
            *item = one(self)?;
        }
        Some(list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NodeShape;

    fn message(sizes: &[u64], body: MessageBody) -> EagerMessage {
        EagerMessage::Message {
            sizes: PartSizes::of(sizes.iter().copied()),
            key: MessageKey {
                context: 7,
                sequence: 1 << 40,
                phase: 2,
                from: 3,
            },
            signature: Signature {
                element: Some(CommElement::Bf16),
                reduction: Some(Reduction::Max),
                hop_code: HopOrder::intra_first(NodeShape {
                    nodes: 2,
                    per_node: 8,
                })
                .code(),
                root: 5,
                elements: 99,
                ..Signature::of(OpKind::AllReduce, "layer 3 of 40, gradients of experté")
            },
            body,
        }
    }

    #[test]
    fn messages_read_back() {
        let reason = "no memory".to_string();
        for message in [
            message(&[3], MessageBody::Inline(vec![1, 2, 3])),
            message(&[1, 2], MessageBody::Inline(vec![1, 2, 3])),
            message(&[0], MessageBody::Inline(Vec::new())),
            message(&[1 << 33], MessageBody::Rendezvous { tag: 9 }),
            message(&[1 << 33, 7], MessageBody::Rendezvous { tag: 9 }),
            EagerMessage::Failure { from: 4, reason },
        ] {
            let bytes = message.encode();
            assert_eq!(EagerMessage::decode(&bytes), Some(message));
            for end in 0..bytes.len().min(HEAD) {
                if let Some(EagerMessage::Message { .. }) = EagerMessage::decode(&bytes[..end]) {
                    panic!("{end} bytes were read as a message");
                }
            }
        }
        let full = message(
            &[INLINE_BYTES as u64],
            MessageBody::Inline(vec![0; INLINE_BYTES]),
        );
        assert_eq!(full.encode().len(), MAX_EAGER_BYTES);
    }

    #[test]
    fn other_messages_between_two_ranks_are_named() {
        let of = |sizes: &[u64]| PartSizes::of(sizes.iter().copied());
        let what = |a: &[u64], b: &[u64]| of(a).difference(&of(b));
        assert_eq!(what(&[3, 4], &[3, 4]), None);
        assert_eq!(what(&[0], &[0]), None);
        let of = |a: &[u64], b: &[u64]| {
            let Difference { what, ours, theirs } = what(a, b).unwrap();
            (what, ours, theirs)
        };
        let number = |n: u32| n.to_string();
        let count = ("the number of messages", number(2), number(1));
        assert_eq!(of(&[3, 4], &[7]), count);
        let bytes = (
            "the number of bytes from there to here",
            number(7),
            number(8),
        );
        assert_eq!(of(&[3, 4], &[3, 5]), bytes);
        assert_eq!(of(&[3, 4], &[4, 3]).0, "the sizes of messages");
    }

    #[test]
    fn the_first_difference_is_named() {
        let ours = Signature::of(OpKind::AllGather, "counts");
        assert_eq!(ours.difference(&ours), None);
        let theirs = Signature {
            elements: 4,
            ..ours.clone()
        };
        let found = ours.difference(&theirs).unwrap();
        assert_eq!(found.what, "the number of elements");
        assert_eq!((&*found.ours, &*found.theirs), ("0", "4"));
        let other = Signature::of(OpKind::Barrier, "x");
        assert_eq!(ours.difference(&other).unwrap().theirs, "`barrier`");
    }
}
