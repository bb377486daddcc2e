//! The bytes that a rank sends in an operation.

use crate::{Collective, NodeShape, OpRow};
use std::fmt;

/// Bytes that a rank sends in an exchange, by distance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Bytes that a rank copies to itself.
    pub here: u64,
    /// Bytes to other ranks of the same node.
    pub node: u64,
    /// Bytes to other nodes.
    pub network: u64,
}

impl std::ops::AddAssign for Sent {
    fn add_assign(&mut self, other: Sent) {
        self.here += other.here;
        self.node += other.node;
        self.network += other.network;
    }
}

/// The data that one rank has for the ranks of an operation's process group.
pub struct Sends<'a> {
    /// The rank that sends.
    pub rank: usize,
    /// The ranks of the process group.
    pub group: &'a [usize],
    /// The nodes of all ranks.
    pub nodes: NodeShape,
    /// Whether the operation reads and writes one tensor, so that the rank's own part stays where
    /// it is.
    pub in_place: bool,
    /// Whether the rank is the one that sends in a broadcast.
    pub is_root: bool,
    /// Returns the bytes for a rank of the group; for a reduction, those that are summed.
    pub bytes: &'a dyn Fn(usize) -> u64,
}

impl fmt::Debug for Sends<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sends")
            .field("rank", &self.rank)
            .finish_non_exhaustive()
    }
}

impl OpRow {
    /// Returns the bytes that a rank sends. A reduction counts the bytes of its shortest form:
    /// every rank sends each foreign part to the part's owner and, where all ranks get the result,
    /// the owner sends it back.
    pub fn sent(&self, sends: &Sends<'_>) -> Sent {
        let mut sent = match self.collective {
            Collective::Local => Sent::default(),
            Collective::Broadcast if !sends.is_root => Sent::default(),
            Collective::AllReduce => {
                let part = 2 * (sends.bytes)(sends.rank) / sends.group.len().max(1) as u64;
                sends.to_each(|_| part)
            }
            _ => sends.to_each(sends.bytes),
        };
        let stays = match self.collective {
            // A rank's own part is summed where it lies.
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter => true,
            _ => sends.in_place,
        };
        if stays {
            sent.here = 0;
        }
        sent
    }
}

impl Sends<'_> {
    fn to_each(&self, bytes: impl Fn(usize) -> u64) -> Sent {
        let mut sent = Sent::default();
        for &to in self.group {
            let bytes = bytes(to);
            if to == self.rank {
                sent.here += bytes;
            } else if self.nodes.share(to, self.rank) {
                sent.node += bytes;
            } else {
                sent.network += bytes;
            }
        }
        sent
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CollectiveOp;

    fn sent(op: CollectiveOp, in_place: bool, is_root: bool) -> [u64; 3] {
        let Sent {
            here,
            node,
            network,
        } = op.row().sent(&Sends {
            rank: 1,
            group: &[0, 1, 2, 3],
            nodes: NodeShape {
                nodes: 2,
                per_node: 2,
            },
            in_place,
            is_root,
            bytes: &|_| 8,
        });
        [here, node, network]
    }

    #[test]
    fn every_pattern_sends_its_own_bytes() {
        assert_eq!(sent(CollectiveOp::RowCounts, false, false), [8, 8, 16]);
        assert_eq!(sent(CollectiveOp::AllGatherWeight, true, false), [0, 8, 16]);
        assert_eq!(sent(CollectiveOp::AllReduceSum, false, false), [0, 4, 8]);
        assert_eq!(
            sent(CollectiveOp::ReduceScatterTp, false, false),
            [0, 8, 16]
        );
        assert_eq!(sent(CollectiveOp::BroadcastTp, false, false), [0, 0, 0]);
        assert_eq!(sent(CollectiveOp::BroadcastTp, false, true), [8, 8, 16]);
        assert_eq!(sent(CollectiveOp::GlobalRouting, false, false), [0, 0, 0]);
    }
}
