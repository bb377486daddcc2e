//! Token counts of TP peers: ranks with shards of the same shared experts.

use super::rows::RowRange;

/// The tokens of all TP peers, ordered by rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TpPeers {
    /// The tokens of each peer.
    counts: Vec<usize>,
    /// This rank's index among the peers.
    own: usize,
}

impl TpPeers {
    pub fn new(counts: Vec<usize>, own: usize) -> TpPeers {
        TpPeers { counts, own }
    }

    /// Returns the tokens of all peers.
    pub fn tokens(&self) -> usize {
        self.counts.iter().sum()
    }

    /// Returns the ranges that this rank sends to each peer: all of its rows.
    pub fn sent(&self) -> Vec<RowRange> {
        let rows = self.counts[self.own];
        let chunk = |peer| RowRange {
            peer,
            first: 0,
            rows,
        };
        let chunks = (0..self.counts.len()).map(chunk);
        chunks.filter(|chunk| chunk.rows > 0).collect()
    }

    /// Returns the ranges in which each peer's rows arrive.
    pub fn arrived(&self) -> Vec<RowRange> {
        let mut first = 0;
        let chunks = self.counts.iter().enumerate().map(|(peer, &rows)| {
            first += rows;
            RowRange {
                peer,
                first: first - rows,
                rows,
            }
        });
        chunks.filter(|chunk| chunk.rows > 0).collect()
    }

    /// Returns the elements of each peer's rows, `width` to a row.
    pub fn elements(&self, width: usize) -> Vec<usize> {
        self.counts.iter().map(|rows| rows * width).collect()
    }

    /// Returns the elements of this rank's rows.
    pub fn own_elements(&self, width: usize) -> usize {
        self.counts[self.own] * width
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_shards_lie_by_rank() {
        let counts = vec![2, 0, 3];
        let at = |own| TpPeers::new(counts.clone(), own);
        let places = |chunks: Vec<RowRange>| -> Vec<_> {
            let chunks = chunks.into_iter();
            chunks.map(|p| (p.peer, p.first, p.rows)).collect()
        };
        assert_eq!(places(at(0).arrived()), [(0, 0, 2), (2, 2, 3)]);
        assert_eq!(places(at(2).sent()), [(0, 0, 3), (1, 0, 3), (2, 0, 3)]);
        assert_eq!(at(1).sent(), []);
        assert_eq!((at(1).tokens(), at(1).own_elements(4)), (5, 0));
        assert_eq!(at(1).elements(4), [8, 0, 12]);
    }
}
