//! The messages of each all-to-all algorithm: rows from each rank to each rank, by level of
//! links.
//!
//! All numbers are in rows of a mesh in which each row goes to every shard of its expert. Other
//! parallelism degrees and row widths only scale them.

mod paths;

use crate::Machine;
use crate::exchange::{LevelLoad, MOST_LEVELS};
use crate::routing::RoutedRows;
use moesaic_dist::{AllToAll, Hop, Parallel, Placement, RowSource};

/// The loads of a rank in one phase by level, in rows.
pub(crate) type LevelLoads = [LevelLoad; MOST_LEVELS];

/// One phase of all ranks: loads in rows by level, and rows of passes over memory.
#[derive(Clone, Debug)]
pub(crate) struct TrafficPhase {
    pub loads: Vec<LevelLoads>,
    /// The rows of each rank that a pass reads and writes; then the number of passes.
    pub copied: Vec<f64>,
    pub passes: f64,
}

impl TrafficPhase {
    /// Returns a phase of messages alone.
    pub fn of(loads: Vec<LevelLoads>) -> TrafficPhase {
        TrafficPhase {
            copied: vec![0.0; loads.len()],
            loads,
            passes: 0.0,
        }
    }
}

/// The phases that bring the rows of one group to their experts.
#[derive(Clone, Debug)]
pub(crate) struct Traffic {
    pub steps: Vec<TrafficPhase>,
    /// The rows that each rank keeps.
    pub own: Vec<f64>,
}

/// The ranks of one group, and the units that they lie in.
#[derive(Clone, Debug)]
pub(crate) struct MeshGroup<'a> {
    pub mesh: Parallel,
    pub start: usize,
    units: Vec<usize>,
    shared: Vec<usize>,
    routing: &'a RoutedRows,
    pub placement: &'a Placement,
    /// Whether all ranks send the same rows to the same groups.
    alike: bool,
    /// The length of a block: consecutive ranks with the same shard. A row uses the rank of its
    /// own place in the block.
    block: usize,
}

impl<'a> MeshGroup<'a> {
    pub fn new(
        machine: &Machine,
        mesh: Parallel,
        start: usize,
        routing: &'a RoutedRows,
        placement: &'a Placement,
    ) -> MeshGroup<'a> {
        MeshGroup {
            mesh,
            start,
            units: machine.units(),
            shared: machine.levels.iter().map(|level| level.shared).collect(),
            routing,
            placement,
            alike: routing.is_alike() && placement.is_for_all(),
            block: 1,
        }
    }

    /// Sets the number of shards that rows go to; with 0, where rows stay, all shards are
    /// assumed.
    pub fn at_r(self, adaptive_r: usize) -> MeshGroup<'a> {
        let block = block(self.mesh, adaptive_r);
        MeshGroup { block, ..self }
    }

    pub fn ranks(&self) -> usize {
        self.mesh.group()
    }

    /// Returns whether the group has whole nodes, several of them, each with several ranks, as
    /// two-dimensional algorithms need.
    pub fn has_nodes(&self) -> bool {
        let node = self.units[0];
        let whole = self.ranks().is_multiple_of(node) && self.start.is_multiple_of(node);
        self.units.len() > 1 && node > 1 && self.ranks() > node && whole
    }

    pub fn tokens(&self, rank: usize) -> f64 {
        self.routing.tokens(self.start + rank)
    }

    /// Returns the rows of a rank's tokens by expert.
    pub fn counts(&self, rank: usize) -> &[f64] {
        self.routing.rows(self.start + rank)
    }

    pub fn rows(&self, rank: usize) -> f64 {
        self.routing.rows(self.start + rank).iter().sum()
    }

    /// Returns the rows of a rank for each rank of the group.
    fn rows_to(&self, from: usize) -> Vec<f64> {
        let rows = self.routing.rows(self.start + from);
        let of = |ep| -> f64 {
            let own = self.placement.of(ep);
            own.iter().map(|&e| rows[e] * self.part(from, e, ep)).sum()
        };
        let by_ep: Vec<f64> = (0..self.mesh.ep).map(of).collect();
        (0..self.ranks())
            .map(|to| by_ep[to / self.mesh.expert_tp])
            .collect()
    }

    /// Returns the rows that arrive at a rank, by its experts.
    pub fn arriving(&self, rank: usize) -> Vec<f64> {
        let ep = rank / self.mesh.expert_tp;
        let experts = self.placement.of(ep);
        let sources = 0..if self.alike { 1 } else { self.ranks() };
        let times = self.ranks() as f64 / sources.len() as f64;
        let mut sums = vec![0.0; experts.len()];
        for from in sources {
            let rows = self.routing.rows(self.start + from);
            for (sum, &expert) in sums.iter_mut().zip(&*experts) {
                *sum += times * rows[expert] * self.part(from, expert, ep);
            }
        }
        sums
    }

    /// Returns the part of a rank's rows for an expert that goes to one group that holds it.
    fn part(&self, from: usize, expert: usize, ep: usize) -> f64 {
        let source = RowSource {
            rank: from,
            ep: from / self.mesh.expert_tp,
        };
        self.placement.part(source, expert, ep)
    }

    /// Returns the owners' groups of the replicas that a rank's group holds without owning them.
    fn copies(&self, ep: usize) -> impl Iterator<Item = usize> {
        let experts = self.placement.of(ep).into_owned().into_iter();
        experts
            .map(|expert| self.placement.owner(expert))
            .filter(move |owner| *owner != ep)
    }

    /// Returns the load of each rank where gradients of replicas are summed at their owners, with
    /// an expert's gradients counted as one byte.
    pub fn sums_of_replicas(&self) -> Vec<LevelLoads> {
        let mut step = self.nothing();
        let expert_tp = self.mesh.expert_tp;
        for ep in 0..self.mesh.ep {
            let mut owners: Vec<usize> = self.copies(ep).collect();
            owners.sort_unstable();
            for same in owners.chunk_by(|a, b| a == b) {
                for tp in 0..expert_tp {
                    let between = [ep, same[0]].map(|group| group * expert_tp + tp);
                    self.sends(&mut step, between, same.len() as f64);
                }
            }
        }
        self.share(&mut step);
        step.loads
    }

    /// Returns a phase without messages.
    pub fn nothing(&self) -> TrafficPhase {
        TrafficPhase::of(vec![LevelLoads::default(); self.ranks()])
    }

    /// Adds a message from one rank to another.
    pub fn sends(&self, step: &mut TrafficPhase, [from, to]: [usize; 2], bytes: f64) {
        let Some(level) = self.level(from, to) else {
            return;
        };
        let mut add = |rank: usize, sent: f64, received: f64| {
            let load: &mut LevelLoad = &mut step.loads[rank][level];
            load.messages += 1.0;
            load.peers += 1.0;
            load.sent += sent;
            load.received += received;
        };
        add(from, bytes, 0.0);
        add(to, 0.0, bytes);
    }

    /// Returns the ranks of the group in a rank's unit at a level.
    fn unit(&self, rank: usize, level: usize) -> std::ops::Range<usize> {
        let unit = self.units[level];
        let place = self.start + rank;
        let first = place - place % unit;
        let last = first.saturating_add(unit);
        let end = last.saturating_sub(self.start).min(self.ranks());
        first.saturating_sub(self.start)..end
    }

    /// Returns the level over which two ranks of the group communicate; `None` for a rank with
    /// itself.
    pub fn level(&self, a: usize, b: usize) -> Option<usize> {
        let (a, b) = (self.start + a, self.start + b);
        (a != b).then(|| {
            let mut levels = 0..self.units.len();
            let last = self.units.len() - 1;
            levels
                .find(|l| a / self.units[*l] == b / self.units[*l])
                .unwrap_or(last)
        })
    }

    fn all(&self) -> All<'_> {
        let sources = 0..if self.alike { 1 } else { self.ranks() };
        All {
            group: self,
            to: sources.map(|from| self.rows_to(from)).collect(),
        }
    }

    /// Returns whether an algorithm's messages are between ranks of equal place in their blocks.
    fn is_by_place(&self, all_to_all: AllToAll) -> bool {
        !self.has_nodes() || by_place(all_to_all, self.units[0], self.block)
    }

    /// Returns whether an algorithm is a single exchange of such messages.
    pub fn is_straight(&self, all_to_all: AllToAll) -> bool {
        let row = all_to_all.row();
        let deduplicates = row.deduplicates && (row.deduplicates_ranks() || self.has_nodes());
        !row.passes_through_ranks() && self.is_by_place(all_to_all) && !deduplicates
    }

    pub fn traffic(&self, all_to_all: AllToAll) -> Traffic {
        let all = self.all();
        let straight = self.is_straight(all_to_all);
        let by_place = self.is_by_place(all_to_all);
        let each = if by_place { self.block as f64 } else { 1.0 };
        let own = (0..self.ranks()).map(|rank| each * all.rows(rank, rank));
        let own = own.collect();
        let mut steps = if straight {
            vec![all.linear(self.block, each)]
        } else {
            all.on_its_path(all_to_all.row(), self.block, each)
        };
        steps.iter_mut().for_each(|step| self.share(step));
        Traffic { steps, own }
    }

    /// Returns the way back: the shard with a rank's own number answers for each expert, in
    /// linear messages; and the rows that each rank answers itself.
    pub fn answers(&self) -> Traffic {
        let all = self.all();
        let mut step = all.linear(self.mesh.expert_tp, 1.0);
        for load in step.loads.iter_mut().flatten() {
            (load.sent, load.received) = (load.received, load.sent);
        }
        self.share(&mut step);
        Traffic {
            own: (0..self.ranks()).map(|rank| all.rows(rank, rank)).collect(),
            steps: vec![step],
        }
    }

    /// Spreads the loads over ranks that share a link: each has an equal part of their sum.
    pub fn share(&self, step: &mut TrafficPhase) {
        for (level, &shared) in self.shared.iter().enumerate().filter(|(_, n)| **n > 1) {
            for ranks in step.loads.chunks_mut(shared) {
                let mean = |of: fn(&LevelLoad) -> f64, ranks: &[LevelLoads]| {
                    ranks.iter().map(|rank| of(&rank[level])).sum::<f64>() / shared as f64
                };
                let (sent, received) = (mean(|l| l.sent, ranks), mean(|l| l.received, ranks));
                for rank in ranks {
                    (rank[level].sent, rank[level].received) = (sent, received);
                }
            }
        }
    }
}

/// The rows from every rank to every rank; a single row of the matrix where all ranks are alike.
struct All<'a> {
    group: &'a MeshGroup<'a>,
    to: Vec<Vec<f64>>,
}

impl All<'_> {
    fn ranks(&self) -> usize {
        self.group.ranks()
    }

    fn rows(&self, from: usize, to: usize) -> f64 {
        match self.to.len() {
            1 => self.to[0][to],
            _ => self.to[from][to],
        }
    }

    /// Sums over sources, counting equal ones once.
    fn over(&self, sources: impl ExactSizeIterator<Item = usize>, to: usize) -> f64 {
        match self.to.len() {
            1 => sources.len() as f64 * self.to[0][to],
            _ => sources.map(|from| self.to[from][to]).sum(),
        }
    }

    /// Returns one exchange between ranks of equal place in blocks of `places` ranks, with `each`
    /// rows for every row of the matrix.
    fn linear(&self, places: usize, each: f64) -> TrafficPhase {
        let one = self.to.len() == 1;
        // Prefix sums make the rows to any range a difference of two numbers: with thousands of
        // ranks, sums over each unit of each rank would dominate the search.
        let sums: Vec<Vec<f64>> = self.to.iter().map(|rows| running(rows, places)).collect();
        let sent = |rank: usize, range: &std::ops::Range<usize>| {
            let sums = &sums[if one { 0 } else { rank }];
            let below = |bound: usize| match bound.checked_sub(rank % places + 1) {
                Some(behind) => sums[behind / places * places + rank % places],
                None => 0.0,
            };
            each * (below(range.end) - below(range.start))
        };
        let load = |rank: usize| {
            let mut loads = LevelLoads::default();
            // A level gets what its units have beyond the units inside, so subtract from level to
            // level, beginning with the rank's own rows.
            let own = each * self.rows(rank, rank);
            let (mut peers, mut out, mut inward) = (1.0, own, own);
            for (level, load) in loads.iter_mut().enumerate().take(self.group.units.len()) {
                let unit = self.group.unit(rank, level);
                let alike = of_its_place(&unit, rank, places);
                let received = each * self.over(alike.clone(), rank);
                let here = (alike.len() as f64, sent(rank, &unit), received);
                *load = LevelLoad {
                    messages: here.0 - peers,
                    peers: here.0 - peers,
                    // Rounding may leave tiny negative differences.
                    sent: (here.1 - out).max(0.0),
                    received: (here.2 - inward).max(0.0),
                };
                (peers, out, inward) = here;
            }
            loads
        };
        TrafficPhase::of((0..self.ranks()).map(load).collect())
    }

    fn node(&self) -> usize {
        self.group.units[0]
    }

    fn nodes(&self) -> usize {
        self.ranks() / self.node()
    }

    /// Returns the messages inside nodes, or between ranks of equal place on different nodes:
    /// `rows(from, to)` rows for each pair.
    fn between(&self, inside: bool, rows: impl Fn(usize, usize) -> f64) -> TrafficPhase {
        let (m, nodes) = (self.node(), self.nodes());
        let mut loads = vec![LevelLoads::default(); self.ranks()];
        for from in 0..self.ranks() {
            let (v, l) = (from / m, from % m);
            let peers = if inside { m } else { nodes };
            for at in 0..peers {
                let to = if inside { v * m + at } else { at * m + l };
                let Some(level) = self.group.level(from, to) else {
                    continue;
                };
                let moved = rows(from, to);
                let load = &mut loads[from][level];
                (load.messages, load.peers) = (load.messages + 1.0, load.peers + 1.0);
                load.sent += moved;
                loads[to][level].received += moved;
            }
        }
        TrafficPhase::of(loads)
    }

    /// Records the rows of each rank in a pass over memory.
    fn passing(&self, step: &mut TrafficPhase, passes: f64, rows: impl Fn(usize) -> f64) {
        step.passes = passes;
        step.copied = (0..self.ranks()).map(|rank| passes * rows(rank)).collect();
    }

    /// Returns all rows of each rank.
    fn all_of(&self) -> Vec<f64> {
        let sums: Vec<f64> = self.to.iter().map(|rows| rows.iter().sum()).collect();
        (0..self.ranks())
            .map(|rank| sums[if sums.len() == 1 { 0 } else { rank }])
            .collect()
    }

    /// Returns the rows of each source summed by a key of the destination, such as its place or
    /// its node.
    fn by(&self, key: impl Fn(usize) -> usize, keys: usize) -> Vec<Vec<f64>> {
        let of = |rows: &Vec<f64>| {
            let mut sums = vec![0.0; keys];
            rows.iter()
                .enumerate()
                .for_each(|(to, n)| sums[key(to)] += n);
            sums
        };
        self.to.iter().map(of).collect()
    }

    fn intra_first(&self) -> Vec<TrafficPhase> {
        let m = self.node();
        let by_place = self.by(|to| to % m, m);
        let of = |from: usize| &by_place[if by_place.len() == 1 { 0 } else { from }];
        let mut inside = self.between(true, |from, to| of(from)[to % m]);
        let network = self.between(false, |from, to| {
            let v = from / m;
            self.over(v * m..(v + 1) * m, to)
        });
        // Packed by place before the first phase, transposed to nodes before the second.
        let all = self.all_of();
        self.passing(&mut inside, 2.0, |rank| all[rank]);
        vec![inside, network]
    }

    fn inter_first(&self) -> Vec<TrafficPhase> {
        let m = self.node();
        let by_node = self.by(|to| to / m, self.nodes());
        let of = |from: usize| &by_node[if by_node.len() == 1 { 0 } else { from }];
        let mut network = self.between(false, |from, to| of(from)[to / m]);
        let inside = self.spread();
        let all = self.all_of();
        self.passing(&mut network, 1.0, |rank| all[rank]);
        vec![network, inside]
    }

    /// Returns the phase in which rows that have crossed between nodes go on to their ranks.
    fn spread(&self) -> TrafficPhase {
        let m = self.node();
        let one = self.to.len() == 1;
        self.between(true, |from, to| {
            if one {
                self.nodes() as f64 * self.to[0][to]
            } else {
                (0..self.nodes())
                    .map(|v| self.to[v * m + from % m][to])
                    .sum()
            }
        })
    }

    /// Returns the phases of hops in one order.
    fn in_order(&self, order: &[Hop; 2]) -> Vec<TrafficPhase> {
        match order[0] {
            Hop::IntraNode => self.intra_first(),
            Hop::InterNode => self.inter_first(),
        }
    }

    /// Sends half of the bytes in each order: in each phase one half is inside nodes and the
    /// other between them.
    fn concurrent(&self, orders: [&[Hop; 2]; 2]) -> Vec<TrafficPhase> {
        let [a, b] = orders.map(|order| self.in_order(order));
        // The first half is inside nodes while the second is between them; then they change
        // places.
        let both = |(a, b): (TrafficPhase, TrafficPhase)| TrafficPhase {
            loads: a
                .loads
                .iter()
                .zip(&b.loads)
                .map(|(a, b)| halves(a, b))
                .collect(),
            copied: a
                .copied
                .iter()
                .zip(&b.copied)
                .map(|(a, b)| (a + b) / 2.0)
                .collect(),
            passes: a.passes + b.passes,
        };
        a.into_iter().zip(b).map(both).collect()
    }

    /// As [`All::inter_first`], with a token of a rank crossing once to each node.
    fn once(&self) -> Vec<TrafficPhase> {
        let m = self.node();
        let routing = self.group.routing;
        let dedup_indices = |rank: usize| -> Vec<f64> {
            let place = self.group.start + rank;
            let touched = |node: usize| {
                let rows = self.of_node(rank, node * m..(node + 1) * m);
                routing.tokens(place) * routing.reach(place, rows).touched(routing.top_k())
            };
            (0..self.nodes()).map(touched).collect()
        };
        // A token counts once for each node that it touches, however many of its experts are
        // there.
        let kept: Vec<Vec<f64>> = (0..self.to.len()).map(dedup_indices).collect();
        let of = |from: usize| &kept[if kept.len() == 1 { 0 } else { from }];
        let mut network = self.between(false, |from, to| of(from)[to / m]);
        let brought: Vec<f64> = (0..self.ranks())
            .map(|rank| of(rank).iter().sum())
            .collect();
        self.passing(&mut network, 1.0, |rank| brought[rank]);
        // With one rank of each place per node, a row that has crossed is already where it
        // belongs.
        if self.group.is_by_place(AllToAll::Dedup) {
            return vec![network];
        }
        vec![network, self.spread()]
    }

    /// Returns the rows of a rank for the experts of a node, by expert, counting the shards of an
    /// expert on the node once.
    fn of_node(
        &self,
        rank: usize,
        node: std::ops::Range<usize>,
    ) -> impl Iterator<Item = (usize, f64)> {
        let group = self.group;
        let expert_tp = group.mesh.expert_tp;
        // A node boundary may lie between the shards of an expert.
        let first = node.start / expert_tp;
        let last = node.end.div_ceil(expert_tp);
        let rows = group.routing.rows(group.start + rank);
        (first..last).flat_map(move |ep| {
            let own = group.placement.of(ep).into_owned().into_iter();
            own.map(move |expert| (expert, rows[expert] * group.part(rank, expert, ep)))
        })
    }
}

/// Returns half the bytes of both.
fn halves(a: &LevelLoads, b: &LevelLoads) -> LevelLoads {
    std::array::from_fn(|level| LevelLoad {
        messages: a[level].messages + b[level].messages,
        peers: a[level].peers.max(b[level].peers),
        sent: (a[level].sent + b[level].sent) / 2.0,
        received: (a[level].received + b[level].received) / 2.0,
    })
}

/// Returns the number of consecutive ranks with the same shard where rows go to `adaptive_r`
/// shards.
pub(crate) fn block(mesh: Parallel, adaptive_r: usize) -> usize {
    mesh.expert_tp.checked_div(adaptive_r).unwrap_or(1)
}

/// Returns whether an algorithm's messages are between ranks of equal place in blocks of `block`
/// ranks. Two-dimensional algorithms are assumed to spread rows over a block, unless a node has
/// one rank of each place.
pub(crate) fn by_place(all_to_all: AllToAll, node: usize, block: usize) -> bool {
    let row = all_to_all.row();
    !row.needs_nodes() || node == block || (node < block && !row.deduplicates)
}

/// Returns the ranks of a range that have a rank's place in blocks.
fn of_its_place(
    range: &std::ops::Range<usize>,
    rank: usize,
    places: usize,
) -> std::iter::StepBy<std::ops::Range<usize>> {
    let before = (rank + places - range.start % places) % places;
    (range.start + before..range.end).step_by(places)
}

/// Returns prefix sums with stride: element `i` is the sum of `list[i]` and every earlier element
/// whose distance is a multiple of `places`.
fn running(list: &[f64], places: usize) -> Vec<f64> {
    let mut sums = list.to_vec();
    for i in places..sums.len() {
        sums[i] += sums[i - places];
    }
    sums
}

#[cfg(test)]
mod tests;
