//! Ranks with equal work, merged to one.

use crate::exchange::{LevelLoad, MOST_LEVELS};
use crate::shadows::Shadows;
use crate::traffic::{LevelLoads, MeshGroup, Traffic, TrafficPhase};
use crate::{Machine, RoutedRows};
use moesaic_plan::{AllToAll, Parallel, Placement, ShadowModel};
use std::borrow::Cow;
use std::collections::HashMap;
use std::rc::Rc;

/// A rank that represents all ranks with equal work.
#[derive(Clone, Debug)]
pub(crate) struct Rank {
    /// Its number among all ranks.
    pub rank: usize,
    /// The group with all experts that it belongs to.
    pub group: usize,
    /// Its tokens.
    pub tokens: f64,
    /// The rows of its tokens, for all experts.
    pub rows: f64,
    /// The rows that arrive, by expert of this rank.
    pub arriving: Vec<f64>,
    /// The rows that it keeps for itself.
    pub own: f64,
    /// Its load in each phase that brings rows to experts.
    pub phases: Vec<PhaseLoad>,
    /// Its load in each phase that brings rows back.
    pub back: Vec<PhaseLoad>,
    /// The rows that it answers itself.
    pub own_back: f64,
    /// Under `dedup`, the phases of rows that each cross on their own, to experts; else empty.
    pub each: Vec<PhaseLoad>,
    /// The same on the way back.
    pub each_back: Vec<PhaseLoad>,
    /// The shadows of its group.
    pub shadows: Rc<Shadows>,
    /// The rows that stay, by shadow.
    pub stay: Vec<f64>,
    /// Its load where gradients of shadows are summed ([`Shadows::sums`]).
    pub sums: LevelLoads,
    /// Its load where gradients of replicas are summed ([`MeshGroup::sums_of_replicas`]).
    pub replicas: LevelLoads,
}

/// A rank's part of one phase, in rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PhaseLoad {
    pub loads: [LevelLoad; MOST_LEVELS],
    pub copied: f64,
    pub passes: f64,
}

impl PhaseLoad {
    /// Returns the load of a part of the rows in the opposite direction.
    fn reversed(&self, part: f64) -> PhaseLoad {
        PhaseLoad {
            loads: self.loads.map(|load| load.reversed().times(part)),
            copied: self.copied * part,
            ..*self
        }
    }
}

/// Returns the distinct ranks of a mesh in which rows go to `adaptive_r` shards; `model` chooses
/// experts with shadows, where some may have one.
pub(crate) fn ranks(
    machine: &Machine,
    mesh: Parallel,
    (routing, placement): (&RoutedRows, &Placement),
    (all_to_all, adaptive_r): (AllToAll, usize),
    model: Option<&ShadowModel>,
) -> Vec<Rank> {
    // Where all ranks have equal rows, all groups are equal too.
    let groups = if routing.is_alike() { 1 } else { mesh.dp };
    // Ranks with equal keys have equal times, so one of them is enough.
    let mut seen = HashMap::new();
    let mut list: Vec<Rank> = Vec::new();
    for at in 0..groups {
        let start = at * mesh.group();
        let all = MeshGroup::new(machine, mesh, start, routing, placement);
        let shadows = model.map_or_else(Rc::default, |model| Rc::new(Shadows::of(model, &all)));
        // Rows for shadows stay, so they are not exchanged.
        let moving = match &*shadows.experts {
            [] => Cow::Borrowed(routing),
            stay => Cow::Owned(routing.clone().without(stay)),
        };
        let group = MeshGroup::new(machine, mesh, start, &moving, placement).at_r(adaptive_r);
        let replicas = group.sums_of_replicas();
        let traffic = group.traffic(all_to_all);
        // In two dimensions, the answers of shards are assumed to be spread evenly over them.
        let row = all_to_all.row();
        let each = if row.deduplicates_ranks() {
            Some(group.traffic(AllToAll::Linear))
        } else {
            (row.deduplicates && group.has_nodes())
                .then(|| group.traffic(AllToAll::TwoDhInterFirst))
        };
        // On the way there every shard gets a row; on the way back one shard per expert answers,
        // so the two directions differ.
        let straight = group.is_straight(all_to_all) && mesh.expert_tp > 1 && adaptive_r > 0;
        let answers = straight.then(|| group.answers());
        for (place, replicas) in replicas.into_iter().enumerate() {
            let mut rank = one(&group, &traffic, place, at);
            rank.stay_with(&shadows, all.counts(place), place);
            rank.replicas = replicas;
            if let Some(answers) = &answers {
                rank.back = vec![share(&answers.steps[0], place)];
                rank.own_back = answers.own[place];
            }
            if let Some(each) = &each {
                let all = one(&group, each, place, at);
                (rank.each, rank.each_back) = (all.phases, all.back);
            }
            // Groups stay distinct, because their ranks wait for each other.
            let key = (at, key(&rank));
            if let std::collections::hash_map::Entry::Vacant(free) = seen.entry(key) {
                free.insert(list.len());
                list.push(rank);
            }
        }
    }
    list
}

/// Returns whether a mesh has the nodes that a two-dimensional all-to-all needs.
pub(crate) fn has_nodes(machine: &Machine, mesh: Parallel, routing: &RoutedRows) -> bool {
    let placement = Placement::contiguous(1, 1);
    MeshGroup::new(machine, mesh, 0, routing, &placement).has_nodes()
}

fn share(step: &TrafficPhase, place: usize) -> PhaseLoad {
    PhaseLoad {
        loads: step.loads[place],
        copied: step.copied[place],
        passes: step.passes,
    }
}

fn one(group: &MeshGroup, traffic: &Traffic, place: usize, number: usize) -> Rank {
    let steps = traffic.steps.iter();
    let phases: Vec<PhaseLoad> = steps.map(|step| share(step, place)).collect();
    // One of the shards answers, after the sum over all of them.
    let part = 1.0 / group.mesh.expert_tp as f64;
    Rank {
        rank: group.start + place,
        group: number,
        tokens: group.tokens(place),
        rows: group.rows(place),
        arriving: group.arriving(place),
        own: traffic.own[place],
        back: phases
            .iter()
            .rev()
            .map(|share| share.reversed(part))
            .collect(),
        own_back: traffic.own[place] * part,
        each: Vec::new(),
        each_back: Vec::new(),
        shadows: Rc::default(),
        stay: Vec::new(),
        sums: LevelLoads::default(),
        replicas: LevelLoads::default(),
        phases,
    }
}

impl Rank {
    /// Keeps the rank's rows for some experts local.
    fn stay_with(&mut self, shadows: &Rc<Shadows>, counts: &[f64], place: usize) {
        self.stay = shadows.experts.iter().map(|e| counts[*e]).collect();
        self.sums = shadows.sums.get(place).copied().unwrap_or_default();
        self.shadows = Rc::clone(shadows);
    }
}

/// Returns the properties that distinguish ranks, to seven digits, so that rounding makes no
/// ranks distinct.
fn key(rank: &Rank) -> Vec<u32> {
    let of = |load: &LevelLoad| [load.peers, load.sent, load.received];
    let loads = rank.phases.iter().chain(&rank.back).flat_map(|phase| {
        let copied = [phase.copied];
        phase.loads.iter().flat_map(of).chain(copied)
    });
    let sums = rank.sums.iter().chain(&rank.replicas).flat_map(of);
    let numbers = rank
        .arriving
        .iter()
        .copied()
        .chain([rank.own, rank.tokens, rank.rows])
        .chain(loads)
        .chain(rank.stay.iter().copied())
        .chain(sums);
    numbers.map(|n| (n as f32).to_bits()).collect()
}
