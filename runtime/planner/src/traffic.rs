//! Who sends how many rows to whom over which links: the messages of each all-to-all.
//!
//! Everything is in rows of a mesh in which each row goes to every shard of its expert;
//! other adaptive parallelism degree and widths of rows only scale it.

use crate::Machine;
use crate::exchange::{Load, MOST_LEVELS};
use crate::routing::Routing;
use moesaic_plan::{AllToAll, Parallel, Placement};

/// What a rank does in one phase, in rows.
pub(crate) type Rows = [Load; MOST_LEVELS];

/// One phase of all ranks: in rows by level, and rows of passes over memory.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub loads: Vec<Rows>,
    /// Rows of a rank that a pass reads and writes, and how many passes.
    pub copied: Vec<f64>,
    pub passes: f64,
}

impl Step {
    /// Messages alone.
    pub fn of(loads: Vec<Rows>) -> Step {
        Step {
            copied: vec![0.0; loads.len()],
            loads,
            passes: 0.0,
        }
    }
}

/// The phases that bring rows of one group to their experts.
#[derive(Clone, Debug)]
pub(crate) struct Traffic {
    pub steps: Vec<Step>,
    /// Rows of a rank for itself.
    pub own: Vec<f64>,
}

/// Ranks of one group, and the units that they lie in.
#[derive(Clone, Debug)]
pub(crate) struct Group<'a> {
    pub mesh: Parallel,
    pub start: usize,
    units: Vec<usize>,
    shared: Vec<usize>,
    routing: &'a Routing,
    pub placement: &'a Placement,
    /// Whether all ranks send the same rows to the same groups.
    alike: bool,
    /// Ranks in a row that have the same shard, of which a row has the one of its own place.
    block: usize,
}

impl<'a> Group<'a> {
    pub fn new(
        machine: &Machine,
        mesh: Parallel,
        start: usize,
        routing: &'a Routing,
        placement: &'a Placement,
    ) -> Group<'a> {
        Group {
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

    /// The same where rows go to so many shards; 0, where they stay, is cost_of for all.
    pub fn at_r(self, adaptive_r: usize) -> Group<'a> {
        let block = block(self.mesh, adaptive_r);
        Group { block, ..self }
    }

    pub fn ranks(&self) -> usize {
        self.mesh.group()
    }

    /// Whether two dimensions are there: nodes that are whole, several of them, of several
    /// ranks.
    pub fn has_nodes(&self) -> bool {
        let node = self.units[0];
        let whole = self.ranks().is_multiple_of(node) && self.start.is_multiple_of(node);
        self.units.len() > 1 && node > 1 && self.ranks() > node && whole
    }

    pub fn tokens(&self, rank: usize) -> f64 {
        self.routing.tokens(self.start + rank)
    }

    /// Rows of a rank's tokens by expert.
    pub fn counts(&self, rank: usize) -> &[f64] {
        self.routing.rows(self.start + rank)
    }

    pub fn rows(&self, rank: usize) -> f64 {
        self.routing.rows(self.start + rank).iter().sum()
    }

    /// Rows of a rank of the group for each rank of it.
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

    /// Rows that arrive at a rank, by its experts.
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

    /// The part of a rank's rows for an expert that goes to a group that has it.
    fn part(&self, from: usize, expert: usize, ep: usize) -> f64 {
        let near = from / self.mesh.expert_tp;
        self.placement.part((from, near), expert, ep)
    }

    /// The replicas of an expert that a rank's group has and does not own, as the groups that
    /// own them.
    fn copies(&self, ep: usize) -> impl Iterator<Item = usize> {
        let experts = self.placement.of(ep).into_owned().into_iter();
        experts
            .map(|expert| self.placement.owner(expert))
            .filter(move |owner| *owner != ep)
    }

    /// What each rank moves where gradients of replicas are summed at their owners; an
    /// expert's are one byte.
    pub fn sums_of_replicas(&self) -> Vec<Rows> {
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

    /// No message of any rank.
    pub fn nothing(&self) -> Step {
        Step::of(vec![Rows::default(); self.ranks()])
    }

    /// A message more from one rank to another.
    pub fn sends(&self, step: &mut Step, [from, to]: [usize; 2], bytes: f64) {
        let Some(level) = self.level(from, to) else {
            return;
        };
        let mut add = |rank: usize, sent: f64, received: f64| {
            let load: &mut Load = &mut step.loads[rank][level];
            load.messages += 1.0;
            load.peers += 1.0;
            load.sent += sent;
            load.received += received;
        };
        add(from, bytes, 0.0);
        add(to, 0.0, bytes);
    }

    /// The ranks of a rank's unit of a level, of the group.
    fn unit(&self, rank: usize, level: usize) -> std::ops::Range<usize> {
        let unit = self.units[level];
        let place = self.start + rank;
        let first = place - place % unit;
        let last = first.saturating_add(unit);
        let end = last.saturating_sub(self.start).min(self.ranks());
        first.saturating_sub(self.start)..end
    }

    /// The level over which two ranks of the group talk; none with oneself.
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

    /// Whether an all-to-all algorithm's messages are between ranks of equal place in their blocks.
    fn is_by_place(&self, all_to_all: AllToAll) -> bool {
        !self.has_nodes() || by_place(all_to_all, self.units[0], self.block)
    }

    /// Whether an all-to-all algorithm is one exchange of those.
    pub fn is_straight(&self, all_to_all: AllToAll) -> bool {
        self.is_by_place(all_to_all) && !(all_to_all == AllToAll::Dedup && self.has_nodes())
    }

    pub fn traffic(&self, all_to_all: AllToAll) -> Traffic {
        let all = self.all();
        let straight = self.is_straight(all_to_all);
        let by_place = self.is_by_place(all_to_all);
        let each = if by_place { self.block as f64 } else { 1.0 };
        let own = (0..self.ranks()).map(|rank| each * all.rows(rank, rank));
        let own = own.collect();
        let mut steps = match all_to_all {
            AllToAll::TwoDhConcurrent if !straight => all.concurrent(),
            AllToAll::TwoDh if !straight => all.intra_first(),
            AllToAll::TwoDhInterFirst if !straight => all.inter_first(),
            AllToAll::Dedup if !straight => all.once(),
            _ => vec![all.linear(self.block, each)],
        };
        steps.iter_mut().for_each(|step| self.share(step));
        Traffic { steps, own }
    }

    /// The way back: a rank is answered by the shard of its own number of each expert. Linear
    /// messages, and rows of a rank for itself.
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

    /// Of links that several ranks share each has an equal part of what all move.
    pub fn share(&self, step: &mut Step) {
        for (level, &shared) in self.shared.iter().enumerate().filter(|(_, n)| **n > 1) {
            for ranks in step.loads.chunks_mut(shared) {
                let mean = |of: fn(&Load) -> f64, ranks: &[Rows]| {
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

/// Rows from every rank to every rank; one row of the matrix where all are alike.
struct All<'a> {
    group: &'a Group<'a>,
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

    /// Sums over sources, of which equal ones are counted once.
    fn over(&self, sources: impl ExactSizeIterator<Item = usize>, to: usize) -> f64 {
        match self.to.len() {
            1 => sources.len() as f64 * self.to[0][to],
            _ => sources.map(|from| self.to[from][to]).sum(),
        }
    }

    /// One exchange of the ranks of each place of so many in a row, with `each` row for a rank
    /// that often.
    fn linear(&self, places: usize, each: f64) -> Step {
        let one = self.to.len() == 1;
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
            let mut loads = Rows::default();
            let own = each * self.rows(rank, rank);
            let (mut peers, mut out, mut inward) = (1.0, own, own);
            for (level, load) in loads.iter_mut().enumerate().take(self.group.units.len()) {
                let unit = self.group.unit(rank, level);
                let alike = of_its_place(&unit, rank, places);
                let received = each * self.over(alike.clone(), rank);
                let here = (alike.len() as f64, sent(rank, &unit), received);
                *load = Load {
                    messages: here.0 - peers,
                    peers: here.0 - peers,
                    sent: (here.1 - out).max(0.0),
                    received: (here.2 - inward).max(0.0),
                };
                (peers, out, inward) = here;
            }
            loads
        };
        Step::of((0..self.ranks()).map(load).collect())
    }

    fn node(&self) -> usize {
        self.group.units[0]
    }

    fn nodes(&self) -> usize {
        self.ranks() / self.node()
    }

    /// Messages between the ranks of a node, or between those of equal place: `bytes(from,
    /// to)` rows for each pair.
    fn between(&self, inside: bool, rows: impl Fn(usize, usize) -> f64) -> Step {
        let (m, nodes) = (self.node(), self.nodes());
        let mut loads = vec![Rows::default(); self.ranks()];
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
        Step::of(loads)
    }

    /// Rows that pass through each rank in a pass over memory.
    fn passing(&self, step: &mut Step, passes: f64, rows: impl Fn(usize) -> f64) {
        step.passes = passes;
        step.copied = (0..self.ranks()).map(|rank| passes * rows(rank)).collect();
    }

    /// All rows of a rank.
    fn all_of(&self) -> Vec<f64> {
        let sums: Vec<f64> = self.to.iter().map(|rows| rows.iter().sum()).collect();
        (0..self.ranks())
            .map(|rank| sums[if sums.len() == 1 { 0 } else { rank }])
            .collect()
    }

    /// Rows of a source for ranks of one place, by place; for ranks of one node, by node.
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

    fn intra_first(&self) -> Vec<Step> {
        let m = self.node();
        let by_place = self.by(|to| to % m, m);
        let of = |from: usize| &by_place[if by_place.len() == 1 { 0 } else { from }];
        let mut inside = self.between(true, |from, to| of(from)[to % m]);
        let network = self.between(false, |from, to| {
            let v = from / m;
            self.over(v * m..(v + 1) * m, to)
        });
        // Packed by place before, turned to nodes between.
        let all = self.all_of();
        self.passing(&mut inside, 2.0, |rank| all[rank]);
        vec![inside, network]
    }

    fn inter_first(&self) -> Vec<Step> {
        let m = self.node();
        let by_node = self.by(|to| to / m, self.nodes());
        let of = |from: usize| &by_node[if by_node.len() == 1 { 0 } else { from }];
        let mut network = self.between(false, |from, to| of(from)[to / m]);
        let inside = self.spread();
        let all = self.all_of();
        self.passing(&mut network, 1.0, |rank| all[rank]);
        vec![network, inside]
    }

    /// What ranks of equal place have brought to a node goes to its ranks.
    fn spread(&self) -> Step {
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

    /// One half of the bytes each of two ways: in each phase one is inside nodes and the
    /// other between them.
    fn concurrent(&self) -> Vec<Step> {
        let (a, b) = (self.intra_first(), self.inter_first());
        let both = |(a, b): (Step, Step)| Step {
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

    /// As [`All::inter_first`], and a token of a rank once to each node.
    fn once(&self) -> Vec<Step> {
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
        let kept: Vec<Vec<f64>> = (0..self.to.len()).map(dedup_indices).collect();
        let of = |from: usize| &kept[if kept.len() == 1 { 0 } else { from }];
        let mut network = self.between(false, |from, to| of(from)[to / m]);
        let brought: Vec<f64> = (0..self.ranks())
            .map(|rank| of(rank).iter().sum())
            .collect();
        self.passing(&mut network, 1.0, |rank| brought[rank]);
        if self.group.is_by_place(AllToAll::Dedup) {
            return vec![network];
        }
        vec![network, self.spread()]
    }

    /// Rows of a rank for the experts of a node, by expert: each shard's once.
    fn of_node(
        &self,
        rank: usize,
        node: std::ops::Range<usize>,
    ) -> impl Iterator<Item = (usize, f64)> {
        let group = self.group;
        let expert_tp = group.mesh.expert_tp;
        // A node may begin between the shards of an expert.
        let first = node.start / expert_tp;
        let last = node.end.div_ceil(expert_tp);
        let rows = group.routing.rows(group.start + rank);
        (first..last).flat_map(move |ep| {
            let own = group.placement.of(ep).into_owned().into_iter();
            own.map(move |expert| (expert, rows[expert] * group.part(rank, expert, ep)))
        })
    }
}

/// Half the bytes of both.
fn halves(a: &Rows, b: &Rows) -> Rows {
    std::array::from_fn(|level| Load {
        messages: a[level].messages + b[level].messages,
        peers: a[level].peers.max(b[level].peers),
        sent: (a[level].sent + b[level].sent) / 2.0,
        received: (a[level].received + b[level].received) / 2.0,
    })
}

/// Ranks in a row that have the same shard where rows go to so many.
pub(crate) fn block(mesh: Parallel, adaptive_r: usize) -> usize {
    mesh.expert_tp.checked_div(adaptive_r).unwrap_or(1)
}

/// Whether an all-to-all algorithm's messages are between ranks of equal place in blocks of so many. In two
/// dimensions rows are cost_of to be spread over a block, unless a node has one rank of each place.
pub(crate) fn by_place(all_to_all: AllToAll, node: usize, block: usize) -> bool {
    match all_to_all {
        AllToAll::Linear => true,
        AllToAll::Dedup => node == block,
        AllToAll::TwoDh | AllToAll::TwoDhInterFirst | AllToAll::TwoDhConcurrent => node <= block,
    }
}

/// The ranks of a range that have a rank's place of so many in a row.
fn of_its_place(
    range: &std::ops::Range<usize>,
    rank: usize,
    places: usize,
) -> std::iter::StepBy<std::ops::Range<usize>> {
    let before = (rank + places - range.start % places) % places;
    (range.start + before..range.end).step_by(places)
}

/// `running(list, places)[i]`: the sum of the number of `i` and of those before it that are
/// a multiple of `places` away.
fn running(list: &[f64], places: usize) -> Vec<f64> {
    let mut sums = list.to_vec();
    for i in places..sums.len() {
        sums[i] += sums[i - places];
    }
    sums
}

/// Equal bytes from a rank to each of some ranks next to each other, by level.
pub(crate) fn to_range(
    machine: &Machine,
    rank: usize,
    range: std::ops::Range<usize>,
    step: usize,
    bytes: f64,
) -> Rows {
    let mut loads = Rows::default();
    let units = machine.units();
    let count = |from: usize, to: usize| {
        // Of range.start + i * step, those below a bound.
        let below = |bound: usize| bound.saturating_sub(range.start).div_ceil(step);
        let last = range.end.min(to);
        below(last).saturating_sub(below(from.max(range.start))) as f64
    };
    let mut inner = count(rank, rank + 1);
    for (load, unit) in loads.iter_mut().zip(&units) {
        let first = rank - rank % unit;
        let all = count(first, first.saturating_add(*unit));
        *load = Load::even(all - inner, (all - inner) * bytes);
        inner = all;
    }
    loads
}

#[cfg(test)]
mod tests;
