//! Which tokens go where between ranks with slices of the same shared experts.

use super::rows::Piece;

/// The tokens of the ranks with slices of the same experts, one rank's after the other's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Neighbours {
    /// Tokens of each.
    counts: Vec<usize>,
    /// Which of them this is.
    own: usize,
}

impl Neighbours {
    pub fn new(counts: Vec<usize>, own: usize) -> Neighbours {
        Neighbours { counts, own }
    }

    /// Tokens of all.
    pub fn tokens(&self) -> usize {
        self.counts.iter().sum()
    }

    /// What this rank sends to each: all of its rows.
    pub fn sent(&self) -> Vec<Piece> {
        let rows = self.counts[self.own];
        let piece = |peer| Piece {
            peer,
            first: 0,
            rows,
        };
        let pieces = (0..self.counts.len()).map(piece);
        pieces.filter(|piece| piece.rows > 0).collect()
    }

    /// Where the rows of each arrive.
    pub fn arrived(&self) -> Vec<Piece> {
        let mut first = 0;
        let pieces = self.counts.iter().enumerate().map(|(peer, &rows)| {
            first += rows;
            Piece {
                peer,
                first: first - rows,
                rows,
            }
        });
        pieces.filter(|piece| piece.rows > 0).collect()
    }

    /// Elements of each one's rows, of so many in a row.
    pub fn elements(&self, width: usize) -> Vec<usize> {
        self.counts.iter().map(|rows| rows * width).collect()
    }

    /// Elements of this rank's rows.
    pub fn own_elements(&self, width: usize) -> usize {
        self.counts[self.own] * width
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_slices_lie_by_rank() {
        let counts = vec![2, 0, 3];
        let at = |own| Neighbours::new(counts.clone(), own);
        let places = |pieces: Vec<Piece>| -> Vec<_> {
            let pieces = pieces.into_iter();
            pieces.map(|p| (p.peer, p.first, p.rows)).collect()
        };
        assert_eq!(places(at(0).arrived()), [(0, 0, 2), (2, 2, 3)]);
        assert_eq!(places(at(2).sent()), [(0, 0, 3), (1, 0, 3), (2, 0, 3)]);
        assert_eq!(at(1).sent(), []);
        assert_eq!((at(1).tokens(), at(1).own_elements(4)), (5, 0));
        assert_eq!(at(1).elements(4), [8, 0, 12]);
    }
}
