//! The layout and the transfers of rows in one call, computed from counts alone.

use moesaic_collectives::schedules::{DedupMap, HopCounts};
use moesaic_plan::{self as plan, Distance, OverlapBy, Parallel, Placement, RankCoords, RowSource};
use std::ops::Range;
use std::sync::Arc;

/// This rank's rows by expert.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct OwnRows {
    /// The start of each expert's rows on the dispatch part, and the end of all.
    pub offsets: Vec<usize>,
    /// The shadowed experts of this call, in the order of the shadow part; their rows stay.
    pub shadowed: Vec<usize>,
}

impl OwnRows {
    /// Returns the number of rows for an expert.
    pub fn of(&self, expert: usize) -> usize {
        self.offsets[expert + 1] - self.offsets[expert]
    }

    /// Returns the number of rows that go to an expert's ranks.
    fn sent(&self, expert: usize) -> usize {
        if self.shadowed.contains(&expert) {
            0
        } else {
            self.of(expert)
        }
    }

    /// Returns the start of each shadow's rows on the shadow part, and the end of all, for
    /// `shadows` shadows. Unused shadows are empty.
    pub fn shadow_offsets(&self, shadows: usize) -> Vec<i64> {
        let mut list = vec![0; shadows + 1];
        for number in 0..shadows {
            let rows = self
                .shadowed
                .get(number)
                .map_or(0, |&expert| self.of(expert));
            list[number + 1] = list[number] + rows as i64;
        }
        list
    }
}

/// Every chunk starts at a multiple of this many rows, so a tensor of two bytes a row starts there
/// at an address that a buffer could have (64 bytes).
const ALIGN: usize = 32;

/// A contiguous range of rows exchanged with one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowRange {
    /// The peer's index in the group.
    pub peer: usize,
    /// The first row.
    pub first: usize,
    /// The number of rows, at least one.
    pub rows: usize,
}

/// The mesh in which rows are exchanged, and a rank's coordinates there.
#[derive(Clone, Copy)]
pub(super) struct RowMesh {
    pub mesh: Parallel,
    pub place: RankCoords,
}

/// The counts that a rank sends before rows.
pub(super) struct SendCounts {
    /// Its rows for the experts of each rank, rank after rank.
    pub counts: Vec<i64>,
    /// The number of counts for each rank.
    pub sizes: Vec<usize>,
}

/// The rows of one rank in one call, possibly in chunks. On the expert part rows are ordered by
/// chunk, then by expert, then by rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rows {
    mesh: Parallel,
    place: RankCoords,
    placement: Placement,
    /// This rank's rows on the dispatch part.
    pub own: Arc<OwnRows>,
    /// The rows from each rank of the group for each expert of this rank.
    received: Vec<Vec<usize>>,
    /// The rows that pass through this rank, where the schedule has several hops.
    pub hop_counts: Option<Arc<HopCounts>>,
    /// The rows that belong to one token, with deduplicated dispatch.
    pub dedup: Option<Arc<DedupMap>>,
    /// The start of each chunk on the expert part, and the end of all.
    firsts: Vec<usize>,
    /// The rule by which rows are split into chunks.
    by: OverlapBy,
}

impl Rows {
    /// Returns the counts that this rank sends. All shards of an expert get the same.
    pub fn send_counts(
        RowMesh { mesh, place }: RowMesh,
        placement: &Placement,
        own: &OwnRows,
    ) -> SendCounts {
        let from = RowSource {
            rank: place.ep * mesh.expert_tp + place.tp,
            ep: place.ep,
        };
        let (mut counts, mut sizes) = (Vec::new(), Vec::with_capacity(mesh.group()));
        for peer in 0..mesh.group() {
            let group = peer / mesh.expert_tp;
            let theirs = placement.of(group);
            sizes.push(theirs.len());
            counts.extend(
                theirs
                    .iter()
                    .map(|&e| placement.share(from, e, own.sent(e), group).len() as i64),
            );
        }
        SendCounts { counts, sizes }
    }

    /// Makes the rows of a call from the counts that arrived: one number for each expert of this
    /// rank, from each rank.
    pub fn new(
        RowMesh { mesh, place }: RowMesh,
        placement: Placement,
        own: Arc<OwnRows>,
        counted: &[i64],
    ) -> Rows {
        let experts = placement.count(place.ep);
        let of_rank = |counts: &[i64]| counts.iter().map(|&count| count as usize).collect();
        let rows = Rows {
            mesh,
            place,
            received: counted.chunks_exact(experts).map(of_rank).collect(),
            placement,
            own,
            hop_counts: None,
            dedup: None,
            firsts: Vec::new(),
            by: OverlapBy::default(),
        };
        rows.in_chunks(1, OverlapBy::default())
    }

    /// Returns the same rows in chunks.
    pub fn in_chunks(mut self, chunks: usize, by: OverlapBy) -> Rows {
        self.by = by;
        self.firsts = vec![0; chunks + 1];
        for number in 0..chunks {
            // Kernels address a chunk as if it were a whole tensor, so its first row must be
            // aligned like one.
            let first = self.firsts[number].next_multiple_of(ALIGN);
            self.firsts[number] = first;
            self.firsts[number + 1] = first + self.rows_of(number);
        }
        self
    }

    /// Returns the number of chunks.
    pub fn chunks(&self) -> usize {
        self.firsts.len() - 1
    }

    fn chunk(&self, number: usize) -> plan::Chunk {
        let (of, by) = (self.chunks(), self.by);
        plan::Chunk { number, of, by }
    }

    /// Returns the part of a chunk of `rows` rows that one rank of the group has for an expert of
    /// another.
    pub fn part_of(&self, number: usize, rows: usize, (from, to): (usize, usize)) -> Range<usize> {
        let group = |rank: usize| rank / self.mesh.expert_tp;
        let distance = Distance::between(group(from), group(to), self.mesh.ep);
        self.chunk(number).rows(rows, distance)
    }

    /// Returns this rank's index in its group.
    fn rank(&self) -> usize {
        self.place.ep * self.mesh.expert_tp + self.place.tp
    }

    /// Returns the number of rows that a chunk has from a rank for one of this rank's experts.
    fn received(&self, number: usize, peer: usize, expert: usize) -> usize {
        let all = self.received[peer][expert];
        self.part_of(number, all, (peer, self.rank())).len()
    }

    /// Returns the number of a chunk's rows that arrive here.
    pub fn rows_of(&self, number: usize) -> usize {
        let of = |peer: usize| {
            let experts = 0..self.received[peer].len();
            experts.map(move |expert| self.received(number, peer, expert))
        };
        (0..self.received.len()).flat_map(of).sum()
    }

    /// Returns the index of each row within its chunk; 0 for the padding between chunks.
    pub fn numbers_in_chunks(&self) -> Vec<i32> {
        let mut numbers = vec![0; self.workspace()];
        for chunk in 0..self.chunks() {
            // Kernels see a chunk as a whole tensor, so its rows are counted from its own first
            // row.
            let own = &mut numbers[self.span(chunk..chunk + 1)];
            own.iter_mut().zip(0..).for_each(|(row, n)| *row = n);
        }
        numbers
    }

    /// Returns the first row of a chunk on the expert part.
    pub fn first_of(&self, number: usize) -> usize {
        self.firsts[number]
    }

    /// Returns the range of rows on the expert part from the first of these chunks to the last,
    /// padding included.
    pub fn span(&self, chunks: Range<usize>) -> Range<usize> {
        let last = chunks.end - 1;
        self.firsts[chunks.start]..self.firsts[last] + self.rows_of(last)
    }

    /// Returns the rows that the expert part needs memory for, padding included.
    pub fn workspace(&self) -> usize {
        self.firsts[self.chunks()]
    }

    /// Returns the chunks of these rows that make up a chunk of an exchange; all of them if it has
    /// none.
    pub fn numbers(&self, chunk: Option<plan::Chunk>) -> Range<usize> {
        chunk.map_or(0..self.chunks(), |chunk| chunk.units(self.chunks()))
    }

    /// Returns the number of rows of this rank's tokens.
    pub fn of_tokens(&self) -> usize {
        self.own.offsets.last().copied().unwrap_or(0)
    }

    /// Returns the number of rows that arrive here.
    pub fn arriving(&self) -> usize {
        self.received.iter().flatten().sum()
    }

    /// Returns the start of each expert's rows in a chunk, and the end of all.
    pub fn expert_offsets(&self, chunk: usize) -> Vec<i64> {
        let experts = self.received[0].len();
        let mut list = Vec::with_capacity(experts + 1);
        list.push(0);
        for expert in 0..experts {
            let peers = 0..self.received.len();
            let rows: usize = peers.map(|peer| self.received(chunk, peer, expert)).sum();
            list.push(list[expert] + rows as i64);
        }
        list
    }

    /// Returns the start of each expert's row tiles in a chunk, and the end of all.
    pub fn row_tiles(&self, chunk: usize, tile_rows: usize) -> Vec<i32> {
        row_tiles(&self.expert_offsets(chunk), tile_rows)
    }

    /// Returns the ranges that this rank sends to every shard of its tokens' experts: one range of
    /// the dispatch part for each expert.
    pub fn sent(&self, chunks: &Range<usize>) -> Vec<RowRange> {
        let peers = 0..self.mesh.group();
        let peers = peers.flat_map(|peer| self.of_owner(peer, chunks));
        peers.collect()
    }

    /// Returns the ranges that this rank gets back, from the shards of its own index: every shard
    /// has the sum, and one copy is enough.
    pub fn answered(&self, chunks: &Range<usize>) -> Vec<RowRange> {
        let peers = (0..self.mesh.group()).filter(|peer| self.same_shard(*peer));
        let peers = peers.flat_map(|peer| self.of_owner(peer, chunks));
        peers.collect()
    }

    /// Returns the ranges that arrive here, on the expert part, by expert, then by rank.
    pub fn arrived(&self, chunks: &Range<usize>) -> Vec<RowRange> {
        let peers = 0..self.mesh.group();
        let peers = peers.flat_map(|peer| self.of_source(peer, chunks));
        peers.collect()
    }

    /// Returns the ranges that this rank sends back, to the ranks with its shard's index.
    pub fn answers(&self, chunks: &Range<usize>) -> Vec<RowRange> {
        let peers = (0..self.mesh.group()).filter(|peer| self.same_shard(*peer));
        let peers = peers.flat_map(|peer| self.of_source(peer, chunks));
        peers.collect()
    }

    fn same_shard(&self, peer: usize) -> bool {
        // After the all-reduce every shard has the sum. Peers of the same index answer each other,
        // which spreads the answers evenly over shards.
        peer % self.mesh.expert_tp == self.place.tp
    }

    /// Returns whether a rank with rows of another rank's tokens answers that rank.
    pub fn answers_to(&self, from: usize, to: usize) -> bool {
        from % self.mesh.expert_tp == to % self.mesh.expert_tp
    }

    /// Returns the rows of this rank's tokens for the experts of a rank, by chunk.
    fn of_owner(&self, peer: usize, chunks: &Range<usize>) -> Vec<RowRange> {
        let (from, group) = (self.rank(), peer / self.mesh.expert_tp);
        let source = RowSource {
            rank: from,
            ep: self.place.ep,
        };
        let experts = self.placement.of(group);
        let chunk = |number: usize, e: usize| {
            let share = self.placement.share(source, e, self.own.sent(e), group);
            let rows = self.part_of(number, share.len(), (from, peer));
            RowRange {
                peer,
                // A chunk is a part of the share that goes to this replica, not of all rows for the
                // expert.
                first: self.own.offsets[e] + share.start + rows.start,
                rows: rows.len(),
            }
        };
        let chunks = chunks.clone();
        let chunks = chunks.flat_map(|number| experts.iter().map(move |&e| (number, e)));
        let chunks = chunks.map(|(number, e)| chunk(number, e));
        chunks.filter(|chunk| chunk.rows > 0).collect()
    }

    /// Returns the rows of a rank's tokens for this rank's experts, by chunk.
    fn of_source(&self, peer: usize, chunks: &Range<usize>) -> Vec<RowRange> {
        let of_chunk = |number: usize| {
            let mut first = self.firsts[number];
            let peers = self.received.len();
            (0..self.received[0].len()).map(move |e| {
                let size = |peer: usize| self.received(number, peer, e);
                // Rows of an expert are ordered by source rank, so that sums in GEMMs' gradients do
                // not depend on arrival.
                let before: usize = (0..peer).map(size).sum();
                let range = RowRange {
                    peer,
                    first: first + before,
                    rows: size(peer),
                };
                first += (0..peers).map(size).sum::<usize>();
                range
            })
        };
        let chunks = chunks.clone().flat_map(of_chunk);
        chunks.filter(|chunk| chunk.rows > 0).collect()
    }
}

/// Returns the start of each expert's row tiles, and the end of all.
pub(super) fn row_tiles(offsets: &[i64], tile_rows: usize) -> Vec<i32> {
    let mut list = Vec::with_capacity(offsets.len());
    list.push(0);
    for edges in offsets.windows(2) {
        let rows = (edges[1] - edges[0]) as usize;
        list.push(list[list.len() - 1] + rows.div_ceil(tile_rows) as i32);
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the rows of every rank of a group, from counts `[rank][expert]`.
    fn group(mesh: Parallel, counts: &[Vec<usize>]) -> Vec<Rows> {
        placed(
            mesh,
            &Placement::contiguous(mesh.ep, counts[0].len()),
            counts,
        )
    }

    fn placed(mesh: Parallel, placement: &Placement, counts: &[Vec<usize>]) -> Vec<Rows> {
        shadowed(mesh, placement, (counts, &[]))
    }

    /// Returns the same with shadowed experts.
    fn shadowed(
        mesh: Parallel,
        placement: &Placement,
        (counts, shadowed): (&[Vec<usize>], &[usize]),
    ) -> Vec<Rows> {
        let offsets = |counts: &Vec<usize>| {
            let mut list = vec![0];
            list.extend(counts.iter().scan(0, |sum, n| {
                *sum += n;
                Some(*sum)
            }));
            Arc::new(OwnRows {
                offsets: list,
                shadowed: shadowed.to_vec(),
            })
        };
        let all: Vec<Arc<OwnRows>> = counts.iter().map(offsets).collect();
        let at = |rank| RowMesh {
            mesh,
            place: mesh.place(rank).unwrap(),
        };
        let counted = all.iter().enumerate();
        let counted = counted.map(|(rank, own)| Rows::send_counts(at(rank), placement, own));
        let counted: Vec<_> = counted.collect();
        let rank = |rank: usize| {
            let mut heard = Vec::new();
            for SendCounts { counts, sizes } in &counted {
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

    /// Returns meshes with contiguous and other placements.
    fn meshes() -> Vec<(Parallel, Placement)> {
        let mesh = |ep, expert_tp| Parallel {
            ep,
            expert_tp,
            ..Parallel::default()
        };
        let sizes = [(1, 1, 3), (2, 1, 5), (3, 2, 7), (2, 3, 2), (4, 1, 4)];
        let plain = sizes.map(|(ep, expert_tp, experts)| {
            (mesh(ep, expert_tp), Placement::contiguous(ep, experts))
        });
        let texts = [
            (1, "3,1 | 0,2"),
            (2, "4,0,+2 | 2,1 | 3,+0"),
            (1, "near: 0,+2 | 1,2 | 3"),
            (3, "near: +1,0 | 1,+0"),
            (1, "0-3 | +0,+3 | +0,+1,+2,+3"),
        ];
        let others = texts.map(|(expert_tp, text)| {
            let placement: Placement = text.parse().unwrap();
            (mesh(placement.groups(), expert_tp), placement)
        });
        plain.into_iter().chain(others).collect()
    }

    #[test]
    fn every_row_goes_to_every_slice_of_its_expert_and_comes_back_once() {
        for (mesh, placement) in meshes() {
            let expert_tp = mesh.expert_tp;
            let counts = some_counts(mesh.group(), placement.experts());
            let all = placed(mesh, &placement, &counts);
            let arriving: Vec<usize> = all.iter().map(Rows::arriving).collect();
            let want = placement.received(expert_tp, &counts);
            let want = want.iter().flat_map(|rows| vec![*rows; expert_tp]);
            assert!(want.eq(arriving), "{placement}: {:?}", counts);
            for (rank, rows) in all.iter().enumerate() {
                let own: usize = counts[rank].iter().sum();
                let back: usize = rows.answered(&(0..1)).iter().map(|chunk| chunk.rows).sum();
                assert_eq!(back, own, "{mesh:?}: rank {rank} gets its rows back");
                let mut next: Vec<_> = rows.answered(&(0..1)).iter().map(|p| p.first).collect();
                next.sort();
                next.dedup();
                assert_eq!(next.len(), rows.answered(&(0..1)).len());
                let sent: usize = rows.sent(&(0..1)).iter().map(|chunk| chunk.rows).sum();
                assert_eq!(sent, own * expert_tp);
                let arrived: usize = rows.arrived(&(0..1)).iter().map(|chunk| chunk.rows).sum();
                assert_eq!(arrived, rows.arriving());
            }
        }
    }

    /// Checks any number of chunks, and exchanges that take several at once.
    #[test]
    fn chunks_of_rows_are_all_rows_once_and_fit_their_peers() {
        for (mesh, placement) in meshes() {
            let counts = some_counts(mesh.group(), placement.experts());
            let whole = placed(mesh, &placement, &counts);
            let by_rows = [(1, 1), (2, 2), (4, 2), (6, 3), (5, 1)];
            let by_ranks = [(1, 1), (2, 2), (4, 2), (7, 3), (5, 1)];
            let by_rows = by_rows.map(|numbers| (numbers, OverlapBy::Rows));
            let by_ranks = by_ranks.map(|numbers| (numbers, OverlapBy::Peers));
            for ((chunks, of), by) in by_rows.into_iter().chain(by_ranks) {
                let all: Vec<Rows> = whole
                    .iter()
                    .map(|rows| rows.clone().in_chunks(chunks, by))
                    .collect();
                let mut taken: Vec<Vec<usize>> = vec![Vec::new(); all.len()];
                for number in 0..of {
                    let units = all[0].numbers(Some(plan::Chunk { number, of, by }));
                    let sizes = |chunks: Vec<RowRange>, peer: usize| -> Vec<usize> {
                        let of_peer = chunks.into_iter().filter(|chunk| chunk.peer == peer);
                        of_peer.map(|chunk| chunk.rows).collect()
                    };
                    for a in 0..mesh.group() {
                        for b in 0..mesh.group() {
                            let sent = sizes(all[a].sent(&units), b);
                            assert_eq!(sent, sizes(all[b].arrived(&units), a));
                            let answers = sizes(all[b].answers(&units), a);
                            assert_eq!(answers, sizes(all[a].answered(&units), b));
                        }
                        let arrived = all[a].arrived(&units).into_iter();
                        let span = all[a].span(units.clone());
                        let rows = arrived.flat_map(|chunk| chunk.first..chunk.first + chunk.rows);
                        let rows: Vec<usize> = rows.collect();
                        assert!(rows.iter().all(|row| span.contains(row)));
                        taken[a].extend(rows);
                    }
                }
                for (rows, mut taken) in all.iter().zip(taken) {
                    taken.sort();
                    taken.dedup();
                    assert_eq!(taken.len(), rows.arriving());
                    assert!(rows.workspace() < rows.arriving() + chunks * ALIGN);
                    let sizes =
                        (0..chunks).map(|chunk| *rows.expert_offsets(chunk).last().unwrap());
                    assert_eq!(sizes.sum::<i64>() as usize, rows.arriving());
                }
            }
        }
    }

    #[test]
    fn messages_of_two_ranks_have_the_same_sizes_in_the_same_order() {
        for (mesh, placement) in meshes() {
            let counts = some_counts(mesh.group(), placement.experts());
            let all = placed(mesh, &placement, &counts);
            let sizes = |chunks: Vec<RowRange>, peer: usize| -> Vec<usize> {
                let of_peer = chunks.into_iter().filter(|chunk| chunk.peer == peer);
                of_peer.map(|chunk| chunk.rows).collect()
            };
            for a in 0..mesh.group() {
                for b in 0..mesh.group() {
                    let (to, from) = (
                        sizes(all[a].sent(&(0..1)), b),
                        sizes(all[b].arrived(&(0..1)), a),
                    );
                    assert_eq!(to, from);
                    let (to, from) = (
                        sizes(all[b].answers(&(0..1)), a),
                        sizes(all[a].answered(&(0..1)), b),
                    );
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
        assert_eq!(all[0].expert_offsets(0), [0, 4, 6]);
        assert_eq!(all[0].row_tiles(0, 3), [0, 2, 3]);
        assert_eq!(all[1].expert_offsets(0), [0, 4]);
        let places = |rows: &Rows| -> Vec<_> {
            let chunks = rows.arrived(&(0..1)).into_iter();
            chunks.map(|p| (p.peer, p.first, p.rows)).collect()
        };
        assert_eq!(places(&all[0]), [(0, 0, 1), (0, 4, 2), (1, 1, 3)]);
        assert_eq!(places(&all[1]), [(1, 0, 4)]);
    }

    #[test]
    fn rows_of_shadowed_experts_stay() {
        let mesh = Parallel {
            ep: 2,
            ..Parallel::default()
        };
        let counts = [vec![1, 2, 0, 5], vec![3, 0, 4, 0]];
        let placement = Placement::contiguous(2, 4);
        let all = shadowed(mesh, &placement, (&counts, &[2, 0]));
        assert_eq!(all[0].expert_offsets(0), [0, 0, 2]);
        assert_eq!(all[1].expert_offsets(0), [0, 0, 5]);
        let peers = |rows: &Rows| -> Vec<usize> {
            let sent = rows.sent(&(0..1)).into_iter();
            sent.map(|chunk| chunk.peer).collect()
        };
        assert_eq!((peers(&all[0]), peers(&all[1])), (vec![0, 1], vec![]));
        assert_eq!(all[0].own.shadow_offsets(3), [0, 0, 1, 1]);
        assert_eq!(all[1].own.shadow_offsets(2), [0, 4, 7]);
        assert_eq!(row_tiles(&all[1].own.shadow_offsets(2), 3), [0, 2, 3]);
    }

    #[test]
    fn ranks_without_tokens_take_part() {
        let mesh = Parallel {
            ep: 2,
            ..Parallel::default()
        };
        let all = group(mesh, &[vec![0, 0], vec![2, 0]]);
        assert_eq!(all[0].sent(&(0..1)), []);
        assert_eq!(all[0].arriving(), 2);
        assert_eq!(all[1].arriving(), 0);
        assert_eq!(all[1].expert_offsets(0), [0, 0]);
    }
}
