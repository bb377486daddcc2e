//! Which rows go where in one call, from counts alone.

use moesaic_plan::{Parallel, Place, Placement};

/// Rows in a row, from or to another rank of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// The other rank, within the group.
    pub peer: usize,
    /// The first row.
    pub first: usize,
    /// How many, at least one.
    pub rows: usize,
}

/// The rows of one call of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rows {
    mesh: Parallel,
    place: Place,
    placement: Placement,
    /// Where the rows of each of all experts begin on the tokens' side, and their end.
    offsets: Vec<usize>,
    /// Rows from each rank of the group for each expert of this rank.
    received: Vec<Vec<usize>>,
}

impl Rows {
    /// What a rank tells the others: the rows that it has for the experts of each, rank
    /// after rank. Slices of an expert get the same.
    pub fn told(
        (mesh, place): (Parallel, Place),
        placement: &Placement,
        offsets: &[usize],
    ) -> (Vec<i64>, Vec<usize>) {
        let from = (place.ep * mesh.shards + place.shard, place.ep);
        let (mut counts, mut sizes) = (Vec::new(), Vec::new());
        for peer in 0..mesh.group() {
            let group = peer / mesh.shards;
            let theirs = placement.of(group);
            sizes.push(theirs.len());
            counts.extend(theirs.iter().map(|&e| {
                let rows = offsets[e + 1] - offsets[e];
                placement.share(from, e, rows, group).len() as i64
            }));
        }
        (counts, sizes)
    }

    /// From what the others have told, as many numbers as this rank has experts from each.
    pub fn new(
        (mesh, place): (Parallel, Place),
        placement: Placement,
        offsets: Vec<usize>,
        told: &[i64],
    ) -> Rows {
        let own = placement.count(place.ep);
        let of_rank = |counts: &[i64]| counts.iter().map(|&count| count as usize).collect();
        Rows {
            mesh,
            place,
            received: told.chunks_exact(own).map(of_rank).collect(),
            placement,
            offsets,
        }
    }

    /// Rows that arrive here.
    pub fn arriving(&self) -> usize {
        self.received.iter().flatten().sum()
    }

    /// Where the rows of each expert of this rank begin, and their end.
    pub fn expert_offsets(&self) -> Vec<i64> {
        let mut list = vec![0];
        for expert in 0..self.received[0].len() {
            let rows: usize = self.received.iter().map(|counts| counts[expert]).sum();
            list.push(list[expert] + rows as i64);
        }
        list
    }

    /// Where the row tiles of each expert of this rank begin, and their end.
    pub fn row_tiles(&self, tile_rows: usize) -> Vec<i32> {
        let offsets = self.expert_offsets();
        let mut list = vec![0];
        for edges in offsets.windows(2) {
            let rows = (edges[1] - edges[0]) as usize;
            list.push(list[list.len() - 1] + rows.div_ceil(tile_rows) as i32);
        }
        list
    }

    /// What this rank's tokens send to every slice of their experts: pieces of the tokens'
    /// side, an expert's rows each.
    pub fn sent(&self) -> Vec<Piece> {
        let peers = 0..self.mesh.group();
        peers.flat_map(|peer| self.of_owner(peer)).collect()
    }

    /// What comes back from the slices that answer this rank: those with its own number.
    pub fn answered(&self) -> Vec<Piece> {
        let peers = (0..self.mesh.group()).filter(|peer| self.same_slice(*peer));
        peers.flat_map(|peer| self.of_owner(peer)).collect()
    }

    /// What arrives here: pieces of the experts' side, by expert, then by rank.
    pub fn arrived(&self) -> Vec<Piece> {
        let peers = 0..self.mesh.group();
        peers.flat_map(|peer| self.of_source(peer)).collect()
    }

    /// What this rank sends back: the rows of ranks whose slice has its number.
    pub fn answers(&self) -> Vec<Piece> {
        let peers = (0..self.mesh.group()).filter(|peer| self.same_slice(*peer));
        peers.flat_map(|peer| self.of_source(peer)).collect()
    }

    fn same_slice(&self, peer: usize) -> bool {
        peer % self.mesh.shards == self.place.shard
    }

    /// The rows of this rank's tokens for the experts of a rank.
    fn of_owner(&self, peer: usize) -> Vec<Piece> {
        let Place { ep, shard, .. } = self.place;
        let (from, group) = (ep * self.mesh.shards + shard, peer / self.mesh.shards);
        let piece = |&e: &usize| {
            let rows = self.offsets[e + 1] - self.offsets[e];
            let share = self.placement.share((from, ep), e, rows, group);
            Piece {
                peer,
                first: self.offsets[e] + share.start,
                rows: share.len(),
            }
        };
        let experts = self.placement.of(group);
        let pieces = experts.iter().map(piece);
        pieces.filter(|piece| piece.rows > 0).collect()
    }

    /// The rows of a rank's tokens for this rank's experts.
    fn of_source(&self, peer: usize) -> Vec<Piece> {
        let offsets = self.expert_offsets();
        let piece = |e: usize| {
            let before = self.received[..peer].iter().map(|counts| counts[e]);
            Piece {
                peer,
                first: offsets[e] as usize + before.sum::<usize>(),
                rows: self.received[peer][e],
            }
        };
        let pieces = (0..offsets.len() - 1).map(piece);
        pieces.filter(|piece| piece.rows > 0).collect()
    }
}

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

    /// The rows of every rank of a group, from counts `[rank][expert]`.
    fn group(mesh: Parallel, counts: &[Vec<usize>]) -> Vec<Rows> {
        placed(
            mesh,
            &Placement::contiguous(mesh.ep, counts[0].len()),
            counts,
        )
    }

    fn placed(mesh: Parallel, placement: &Placement, counts: &[Vec<usize>]) -> Vec<Rows> {
        let offsets = |counts: &Vec<usize>| {
            let mut list = vec![0];
            list.extend(counts.iter().scan(0, |sum, n| {
                *sum += n;
                Some(*sum)
            }));
            list
        };
        let all: Vec<Vec<usize>> = counts.iter().map(offsets).collect();
        let at = |rank| (mesh, mesh.place(rank).unwrap());
        let told = all.iter().enumerate();
        let told = told.map(|(rank, own)| Rows::told(at(rank), placement, own));
        let told: Vec<_> = told.collect();
        let rank = |rank: usize| {
            let mut heard = Vec::new();
            for (counts, sizes) in &told {
                let first: usize = sizes[..rank].iter().sum();
                heard.extend(&counts[first..first + sizes[rank]]);
            }
            Rows::new(at(rank), placement.clone(), all[rank].clone(), &heard)
        };
        (0..mesh.group()).map(rank).collect()
    }

    fn some_counts(ranks: usize, experts: usize) -> Vec<Vec<usize>> {
        let count = |rank: usize, e: usize| (rank * 7 + e * 5 + rank * e) % 4;
        let of_rank = |rank| (0..experts).map(|e| count(rank, e)).collect();
        (0..ranks).map(of_rank).collect()
    }

    /// Meshes with placements, contiguous ones and others.
    fn meshes() -> Vec<(Parallel, Placement)> {
        let mesh = |ep, shards| Parallel {
            ep,
            shards,
            ..Parallel::default()
        };
        let sizes = [(1, 1, 3), (2, 1, 5), (3, 2, 7), (2, 3, 2), (4, 1, 4)];
        let plain = sizes
            .map(|(ep, shards, experts)| (mesh(ep, shards), Placement::contiguous(ep, experts)));
        let texts = [
            (1, "3,1 | 0,2"),
            (2, "4,0,+2 | 2,1 | 3,+0"),
            (1, "near: 0,+2 | 1,2 | 3"),
            (3, "near: +1,0 | 1,+0"),
            (1, "0-3 | +0,+3 | +0,+1,+2,+3"),
        ];
        let others = texts.map(|(shards, text)| {
            let placement: Placement = text.parse().unwrap();
            (mesh(placement.groups(), shards), placement)
        });
        plain.into_iter().chain(others).collect()
    }

    #[test]
    fn every_row_goes_to_every_slice_of_its_expert_and_comes_back_once() {
        for (mesh, placement) in meshes() {
            let shards = mesh.shards;
            let counts = some_counts(mesh.group(), placement.experts());
            let all = placed(mesh, &placement, &counts);
            let arriving: Vec<usize> = all.iter().map(Rows::arriving).collect();
            let want = placement.received(shards, &counts);
            let want = want.iter().flat_map(|rows| vec![*rows; shards]);
            assert!(want.eq(arriving), "{placement}: {:?}", counts);
            for (rank, rows) in all.iter().enumerate() {
                let own: usize = counts[rank].iter().sum();
                let back: usize = rows.answered().iter().map(|piece| piece.rows).sum();
                assert_eq!(back, own, "{mesh:?}: rank {rank} gets its rows back");
                let mut next: Vec<_> = rows.answered().iter().map(|p| p.first).collect();
                next.sort();
                next.dedup();
                assert_eq!(next.len(), rows.answered().len());
                let sent: usize = rows.sent().iter().map(|piece| piece.rows).sum();
                assert_eq!(sent, own * shards);
                let arrived: usize = rows.arrived().iter().map(|piece| piece.rows).sum();
                assert_eq!(arrived, rows.arriving());
            }
        }
    }

    #[test]
    fn messages_of_two_ranks_have_the_same_sizes_in_the_same_order() {
        for (mesh, placement) in meshes() {
            let counts = some_counts(mesh.group(), placement.experts());
            let all = placed(mesh, &placement, &counts);
            let sizes = |pieces: Vec<Piece>, peer: usize| -> Vec<usize> {
                let of_peer = pieces.into_iter().filter(|piece| piece.peer == peer);
                of_peer.map(|piece| piece.rows).collect()
            };
            for a in 0..mesh.group() {
                for b in 0..mesh.group() {
                    let (to, from) = (sizes(all[a].sent(), b), sizes(all[b].arrived(), a));
                    assert_eq!(to, from);
                    let (to, from) = (sizes(all[b].answers(), a), sizes(all[a].answered(), b));
                    assert_eq!(to, from);
                }
            }
        }
    }

    #[test]
    fn rows_lie_by_expert_then_by_rank() {
        let mesh = Parallel {
            ep: 2,
            ..Parallel::default()
        };
        let all = group(mesh, &[vec![1, 2, 0], vec![3, 0, 4]]);
        assert_eq!(all[0].expert_offsets(), [0, 4, 6]);
        assert_eq!(all[0].row_tiles(3), [0, 2, 3]);
        assert_eq!(all[1].expert_offsets(), [0, 4]);
        let places = |rows: &Rows| -> Vec<_> {
            let pieces = rows.arrived().into_iter();
            pieces.map(|p| (p.peer, p.first, p.rows)).collect()
        };
        assert_eq!(places(&all[0]), [(0, 0, 1), (0, 4, 2), (1, 1, 3)]);
        assert_eq!(places(&all[1]), [(1, 0, 4)]);
    }

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

    #[test]
    fn ranks_without_tokens_take_part() {
        let mesh = Parallel {
            ep: 2,
            ..Parallel::default()
        };
        let all = group(mesh, &[vec![0, 0], vec![2, 0]]);
        assert_eq!(all[0].sent(), []);
        assert_eq!(all[0].arriving(), 2);
        assert_eq!(all[1].arriving(), 0);
        assert_eq!(all[1].expert_offsets(), [0, 0]);
    }
}
