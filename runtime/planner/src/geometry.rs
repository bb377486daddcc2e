//! Ranks that have the same to do are one.

use crate::exchange::{Load, MOST_LEVELS};
use crate::shadows::Shadows;
use crate::traffic::{Group, Rows, Step, Traffic};
use crate::{Machine, Routing};
use moesaic_plan::{AllToAll, Parallel, Placement, ShadowModel};
use std::borrow::Cow;
use std::collections::HashMap;
use std::rc::Rc;

/// A rank that stands for all that have the same to do.
#[derive(Clone, Debug)]
pub(crate) struct Rank {
    /// Its number among all.
    pub rank: usize,
    /// Which group that holds all experts it is in.
    pub group: usize,
    /// Its tokens.
    pub tokens: f64,
    /// Rows that its tokens have for all experts.
    pub rows: f64,
    /// Rows that arrive, by its experts.
    pub arriving: Vec<f64>,
    /// Rows that it has for itself.
    pub own: f64,
    /// What it does in each phase that brings rows to experts.
    pub phases: Vec<PhaseLoad>,
    /// What it does in each phase that brings them back.
    pub back: Vec<PhaseLoad>,
    /// Rows that it answers itself.
    pub own_back: f64,
    /// By an all-to-all algorithm on which tokens cross once: the phases of rows that each cross, there and
    /// back. Else none.
    pub each: Vec<PhaseLoad>,
    /// See `each`.
    pub each_back: Vec<PhaseLoad>,
    /// The shadows of its group.
    pub shadows: Rc<Shadows>,
    /// Rows that stay, by shadow.
    pub stay: Vec<f64>,
    /// What it moves where gradients of shadows are summed ([`Shadows::sums`]),
    pub sums: Rows,
    /// and where those of replicas are ([`Group::sums_of_replicas`]).
    pub replicas: Rows,
}

/// A rank's part of one phase, in rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PhaseLoad {
    pub loads: [Load; MOST_LEVELS],
    pub copied: f64,
    pub passes: f64,
}

impl PhaseLoad {
    /// The same the other way, of a part of the rows.
    fn turned(&self, part: f64) -> PhaseLoad {
        PhaseLoad {
            loads: self.loads.map(|load| load.turned().times(part)),
            copied: self.copied * part,
            ..*self
        }
    }
}

/// The ranks of a mesh in which rows go to `adaptive_r` shards, as far as they differ; `model`
/// says which experts have shadows, where some may.
pub(crate) fn ranks(
    machine: &Machine,
    mesh: Parallel,
    (routing, placement): (&Routing, &Placement),
    (all_to_all, adaptive_r): (AllToAll, usize),
    model: Option<&ShadowModel>,
) -> Vec<Rank> {
    // Where all have the same rows, groups do.
    let groups = if routing.is_alike() { 1 } else { mesh.dp };
    let mut seen = HashMap::new();
    let mut list: Vec<Rank> = Vec::new();
    for at in 0..groups {
        let start = at * mesh.group();
        let all = Group::new(machine, mesh, start, routing, placement);
        let shadows = model.map_or_else(Rc::default, |model| Rc::new(Shadows::of(model, &all)));
        let moving = match &*shadows.experts {
            [] => Cow::Borrowed(routing),
            stay => Cow::Owned(routing.clone().without(stay)),
        };
        let group = Group::new(machine, mesh, start, &moving, placement).at_r(adaptive_r);
        let replicas = group.sums_of_replicas();
        let traffic = group.traffic(all_to_all);
        // In two dimensions answers of shards are cost_of to be spread evenly over them.
        let each = (all_to_all == AllToAll::Dedup && group.has_nodes())
            .then(|| group.traffic(AllToAll::TwoDhInterFirst));
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
            let key = (at, key(&rank));
            if let std::collections::hash_map::Entry::Vacant(free) = seen.entry(key) {
                free.insert(list.len());
                list.push(rank);
            }
        }
    }
    list
}

/// Whether an all-to-all algorithm in two dimensions is there in a mesh.
pub(crate) fn has_nodes(machine: &Machine, mesh: Parallel, routing: &Routing) -> bool {
    let placement = Placement::contiguous(1, 1);
    Group::new(machine, mesh, 0, routing, &placement).has_nodes()
}

fn share(step: &Step, place: usize) -> PhaseLoad {
    PhaseLoad {
        loads: step.loads[place],
        copied: step.copied[place],
        passes: step.passes,
    }
}

fn one(group: &Group, traffic: &Traffic, place: usize, number: usize) -> Rank {
    let steps = traffic.steps.iter();
    let phases: Vec<PhaseLoad> = steps.map(|step| share(step, place)).collect();
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
            .map(|share| share.turned(part))
            .collect(),
        own_back: traffic.own[place] * part,
        each: Vec::new(),
        each_back: Vec::new(),
        shadows: Rc::default(),
        stay: Vec::new(),
        sums: Rows::default(),
        replicas: Rows::default(),
        phases,
    }
}

impl Rank {
    /// Its rows for some experts stay.
    fn stay_with(&mut self, shadows: &Rc<Shadows>, counts: &[f64], place: usize) {
        self.stay = shadows.experts.iter().map(|e| counts[*e]).collect();
        self.sums = shadows.sums.get(place).copied().unwrap_or_default();
        self.shadows = Rc::clone(shadows);
    }
}

/// What tells ranks apart, to seven digits.
fn key(rank: &Rank) -> Vec<u32> {
    let of = |load: &Load| [load.peers, load.sent, load.received];
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
