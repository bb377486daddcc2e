//! The phases of each algorithm, and those whose messages do not depend on nodes, other than one
//! exchange of all rows: around a ring, and deduplicated between ranks.

use super::{All, LevelLoads, TrafficPhase};
use moesaic_dist::{AllToAllRow, RowPath};

impl All<'_> {
    /// Returns the phases of an algorithm; places and rows are those of [`All::linear`].
    pub(super) fn on_its_path(
        &self,
        row: &AllToAllRow,
        places: usize,
        each: f64,
    ) -> Vec<TrafficPhase> {
        match row.path {
            _ if row.deduplicates_ranks() => vec![self.once_to_ranks(places, each)],
            _ if row.deduplicates => self.once(),
            RowPath::Direct | RowPath::OverNodes([]) => vec![self.linear(places, each)],
            RowPath::Ring => self.around(places, each),
            RowPath::OverNodes([order]) => self.in_order(order),
            RowPath::OverNodes([one, other, ..]) => self.concurrent([one, other]),
        }
    }

    /// Returns one phase for each hop around the ring of all ranks, with rows as in
    /// [`All::linear`].
    fn around(&self, places: usize, each: f64) -> Vec<TrafficPhase> {
        let ranks = self.ranks();
        let rows = |from: usize, to: usize| {
            let goes = from % places == to % places;
            if goes {
                each * self.rows(from, to)
            } else {
                0.0
            }
        };
        let others = |from: usize| (1..ranks).map(move |distance| (from + distance) % ranks);
        // The rows of each rank that have not arrived.
        let on_the_way = |from: usize| others(from).map(|to| rows(from, to)).sum();
        let mut moving: Vec<f64> = (0..ranks).map(on_the_way).collect();
        let hop = |hop: usize| {
            let mut loads = vec![LevelLoads::default(); ranks];
            for (from, moving) in moving.iter_mut().enumerate() {
                let [holder, next] = [hop, hop + 1].map(|hops| (from + hops) % ranks);
                let Some(level) = self.group.level(holder, next) else {
                    continue;
                };
                loads[holder][level].sent = *moving;
                loads[next][level].received = *moving;
                for rank in [holder, next] {
                    let load = &mut loads[rank][level];
                    (load.messages, load.peers) = (1.0, 1.0);
                }
                // Rounding may leave tiny negative differences.
                *moving = (*moving - rows(from, next)).max(0.0);
            }
            TrafficPhase::of(loads)
        };
        (0..ranks.max(2) - 1).map(hop).collect()
    }

    /// As [`All::linear`], with a token of a rank going once to each rank.
    fn once_to_ranks(&self, places: usize, each: f64) -> TrafficPhase {
        let (routing, mesh) = (self.group.routing, self.group.mesh);
        let touched = |rank: usize| -> Vec<f64> {
            let place = self.group.start + rank;
            let tokens = routing.tokens(place);
            let of = |ep: usize| {
                let to = ep * mesh.expert_tp;
                let rows = self.of_node(rank, to..to + 1);
                each * tokens * routing.reach(place, rows).touched(routing.top_k())
            };
            (0..mesh.ep).map(of).collect()
        };
        let kept: Vec<Vec<f64>> = (0..self.to.len()).map(touched).collect();
        let mut phase = self.group.nothing();
        for from in 0..self.ranks() {
            let kept = &kept[if kept.len() == 1 { 0 } else { from }];
            for to in (from % places..self.ranks()).step_by(places) {
                let Some(level) = self.group.level(from, to) else {
                    continue;
                };
                let (moved, load) = (kept[to / mesh.expert_tp], &mut phase.loads[from][level]);
                (load.messages, load.peers) = (load.messages + 1.0, load.peers + 1.0);
                load.sent += moved;
                phase.loads[to][level].received += moved;
            }
        }
        phase
    }
}
