//! The table of all-to-all algorithms of rows.

use crate::NodeShape;
use crate::schedules::Algorithm;
use serde::{Deserialize, Serialize};

/// The all-to-all algorithm of rows. What arrives is the same, except for the sums of
/// [`AllToAll::Dedup`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum AllToAll {
    /// Every rank sends to every rank directly.
    #[default]
    Linear,
    /// Two hops (2DH): inside nodes first, then between ranks with the same index in their nodes.
    /// Rows come back over the same ranks in the opposite order.
    #[serde(rename = "2dh")]
    TwoDh,
    /// Two hops: between ranks with the same index first, then inside nodes, and back.
    #[serde(rename = "2dh-inter-first")]
    TwoDhInterFirst,
    /// Half of the bytes by [`AllToAll::TwoDh`] and half by [`AllToAll::TwoDhInterFirst`], so that
    /// messages inside nodes and between nodes travel at the same time.
    #[serde(rename = "2dh-concurrent")]
    TwoDhConcurrent,
    /// Deduplicated dispatch: a token crosses to a node once, whatever the number of its experts
    /// there, and comes back as one partial sum. This applies to gradients of rows and to rows that
    /// experts have weighted; where `combine` applies the weights, one row comes back for each
    /// expert.
    Dedup,
    /// Around a ring of all ranks of the group, in their order: in each of `n - 1` hops a rank
    /// sends the next one all rows that have not arrived. Rows come back in the opposite direction.
    /// A rank sends about `n / 2` times as many bytes as with [`AllToAll::Linear`], so take it only
    /// where ranks have links to two neighbours alone, or each rank may have one message in flight.
    Ring,
    /// Deduplicated dispatch between ranks: a token goes directly to each rank of its experts once,
    /// and comes back from there as one partial sum, where [`AllToAll::Dedup`] has one.
    DedupRanks,
}

/// One hop of a row over the nodes of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hop {
    /// Between ranks of one node.
    IntraNode,
    /// Between ranks with the same index in their nodes.
    InterNode,
}

/// The way of rows from their tokens' ranks to their experts' ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowPath {
    /// Every rank sends to every rank directly.
    Direct,
    /// Two hops over the nodes of the group, in these orders. Each order moves one share of the
    /// rows; shares move concurrently.
    OverNodes(&'static [[Hop; 2]]),
    /// Every rank sends to the next rank of a ring, which passes on what is for others.
    Ring,
}

/// One row of [`ALL_TO_ALLS`].
#[derive(Clone, Copy, Debug)]
pub struct AllToAllRow {
    /// The algorithm.
    pub all_to_all: AllToAll,
    /// Its name in the text of a strategy.
    pub name: &'static str,
    /// The way of rows to experts. They come back the same way in the opposite direction.
    pub path: RowPath,
    /// Whether searches and benches try the algorithm by themselves.
    pub searched: bool,
    /// Whether equal rows of a token cross to a node once, and sums of rows come back once. Where
    /// rows go directly, each rank counts as a node of its own.
    pub deduplicates: bool,
}

use Hop::{InterNode, IntraNode};

/// The all-to-all algorithms, in the order of [`AllToAll`].
pub const ALL_TO_ALLS: [AllToAllRow; 7] = [
    AllToAllRow {
        all_to_all: AllToAll::Linear,
        name: "linear",
        path: RowPath::Direct,
        searched: true,
        deduplicates: false,
    },
    AllToAllRow {
        all_to_all: AllToAll::TwoDh,
        name: "2dh",
        path: RowPath::OverNodes(&[[IntraNode, InterNode]]),
        searched: true,
        deduplicates: false,
    },
    AllToAllRow {
        all_to_all: AllToAll::TwoDhInterFirst,
        name: "2dh-inter-first",
        path: RowPath::OverNodes(&[[InterNode, IntraNode]]),
        searched: true,
        deduplicates: false,
    },
    AllToAllRow {
        all_to_all: AllToAll::TwoDhConcurrent,
        name: "2dh-concurrent",
        path: RowPath::OverNodes(&[[IntraNode, InterNode], [InterNode, IntraNode]]),
        searched: true,
        deduplicates: false,
    },
    AllToAllRow {
        all_to_all: AllToAll::Dedup,
        name: "dedup",
        path: RowPath::OverNodes(&[[InterNode, IntraNode]]),
        searched: true,
        deduplicates: true,
    },
    AllToAllRow {
        all_to_all: AllToAll::Ring,
        name: "ring",
        path: RowPath::Ring,
        // The planner's machines have no links that a ring would use better than direct messages.
        searched: false,
        deduplicates: false,
    },
    AllToAllRow {
        all_to_all: AllToAll::DedupRanks,
        name: "dedup-ranks",
        path: RowPath::Direct,
        // Results may differ from those of one process in the last bits, so you ask for it.
        searched: false,
        deduplicates: true,
    },
];

impl AllToAll {
    /// Returns the algorithm's row of the table.
    #[doc(hidden)]
    pub fn row(self) -> &'static AllToAllRow {
        &ALL_TO_ALLS[self as usize]
    }
}

impl AllToAllRow {
    /// Returns whether every rank sends each row to every rank directly, whatever the nodes.
    pub fn is_direct(&self) -> bool {
        self.path == RowPath::Direct && !self.deduplicates
    }

    /// Returns whether a token goes to each rank once.
    pub fn deduplicates_ranks(&self) -> bool {
        self.path == RowPath::Direct && self.deduplicates
    }

    /// Returns whether rows pass through ranks that neither send nor want them, whatever the nodes.
    pub fn passes_through_ranks(&self) -> bool {
        self.path == RowPath::Ring
    }

    /// Returns whether the algorithm needs several nodes with the same number of consecutive ranks.
    pub fn needs_nodes(&self) -> bool {
        matches!(self.path, RowPath::OverNodes(_))
    }

    /// Returns the number of shares of a row that move concurrently.
    pub fn shares(&self) -> usize {
        match self.path {
            RowPath::Direct | RowPath::Ring => 1,
            RowPath::OverNodes(orders) => orders.len(),
        }
    }

    /// Returns the number of hops in one direction, over all shares: a measure of complexity.
    pub fn hops(&self) -> usize {
        match self.path {
            // Sums on the way are as complex as another hop.
            RowPath::Direct => 1 + usize::from(self.deduplicates),
            RowPath::OverNodes(orders) => orders.iter().map(|order| order.len()).sum(),
            // One hop for each other rank: with many ranks more than any other algorithm.
            RowPath::Ring => usize::MAX,
        }
    }

    /// Returns the messages of the counts, and of rows that each travel on their own. An algorithm
    /// that needs no nodes takes only the number of ranks from the shape.
    pub fn algorithm(&self, shape: NodeShape) -> Algorithm {
        match self.path {
            RowPath::Direct => Algorithm::Direct,
            RowPath::OverNodes([[IntraNode, _]]) => Algorithm::Hierarchical(shape),
            RowPath::OverNodes([[InterNode, _]]) => Algorithm::InterFirst(shape),
            RowPath::OverNodes(_) => Algorithm::Concurrent(shape),
            RowPath::Ring => Algorithm::Ring(shape.ranks()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedules::HopOrder;

    #[test]
    fn every_algorithm_has_its_own_row() {
        for (at, row) in ALL_TO_ALLS.iter().enumerate() {
            assert_eq!(row.all_to_all as usize, at, "{}", row.name);
            let parsed: AllToAll = row.name.parse().unwrap();
            assert_eq!(parsed, row.all_to_all);
            let json = serde_json::to_string(&row.all_to_all).unwrap();
            assert_eq!(json, format!("\"{}\"", row.name));
        }
        assert_eq!(AllToAll::DedupRanks as usize + 1, ALL_TO_ALLS.len());
    }

    /// Checks that the hops of the table are those of the schedules, whose level 0 is between
    /// nodes.
    #[test]
    fn the_hops_of_the_table_are_sent() {
        let shape = NodeShape {
            nodes: 2,
            per_node: 3,
        };
        let level = |hop: &Hop| usize::from(*hop == IntraNode);
        for row in &ALL_TO_ALLS {
            let orders = match row.path {
                RowPath::OverNodes(orders) => orders,
                RowPath::Direct | RowPath::Ring => &[],
            };
            let want: Vec<Vec<usize>> = orders
                .iter()
                .map(|order| order.iter().map(level).collect())
                .collect();
            let sent = row
                .algorithm(shape)
                .hops()
                .filter(|hops| hops.ring.is_none());
            assert_eq!(sent.map_or(Vec::new(), |hops: HopOrder| hops.orders), want);
        }
    }
}
