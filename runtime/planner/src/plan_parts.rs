//! The cost of the launches of each part of a plan, for one rank.

use crate::collective_ops::CommConfig;
use crate::cost::{Cost, LaunchRows, Launches};
use crate::geometry::Rank;
use moesaic_plan::{LayerPlan, PlanPart, Step};
use std::rc::Rc;

/// A step of a part's pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartStep {
    pub part: PlanPart,
    pub step: usize,
}

/// The launch costs of each part, in one pass.
pub(crate) struct PartCosts {
    tokens: Rc<Launches>,
    experts: Rc<Launches>,
    shared: Option<Rc<Launches>>,
    shadows: Option<Rc<Launches>>,
    /// The rows at the experts of each rank, where ranks share processors; else empty.
    co_located: Vec<f64>,
}

/// A pass of a part's plan, as its steps.
pub(crate) type StepsOf = fn(&LayerPlan) -> &[Step];

/// Collects the launch costs; the smallest chunk has the fraction `least` of the rows.
pub(crate) fn part_costs(
    ranks: &[Rank],
    comm: &CommConfig,
    pass: &'static str,
    of: StepsOf,
    least: f64,
) -> PartCosts {
    let range = |rows: &dyn Fn(&Rank) -> f64| {
        let each = ranks.iter().map(rows);
        each.fold((f64::INFINITY, 0.0f64), |(low, high), n| {
            (low.min(n), high.max(n))
        })
    };
    let plan = comm.plan;
    let made = |part: PlanPart, (few, many): (f64, f64)| {
        // Floats are no hash keys, but their bits are: equal ranges share a measurement.
        let key = (part, pass, [few, many].map(f64::to_bits));
        let mut costs = comm.costs.borrow_mut();
        let make = || {
            let plan = plan.part(part);
            Rc::new(Launches::new(plan, of(plan), comm.machine, few, many))
        };
        Rc::clone(costs.entry(key).or_insert_with(make))
    };
    let tokens = range(&|rank| rank.tokens);
    let (few, many) = range(&|rank| all_rows(comm, rank));
    let expert_tp = comm.mesh.expert_tp as f64;
    let tp_tokens = (tokens.0 * expert_tp, tokens.1 * expert_tp);
    let shares = comm.machine.compute.ranks_per_processor > 1.0;
    let co_located = ranks.iter().filter(|_| shares);
    PartCosts {
        co_located: co_located.map(|rank| all_rows(comm, rank)).collect(),
        tokens: made(PlanPart::Dispatch, tokens),
        experts: made(PlanPart::Experts, (few * least, many)),
        shared: plan
            .shared
            .is_some()
            .then(|| made(PlanPart::Shared, tp_tokens)),
        shadows: plan
            .shadows
            .is_some()
            .then(|| made(PlanPart::Shadows, range(&|rank| rank.stay.iter().sum()))),
    }
}

/// Returns the rows at a rank's experts.
fn all_rows(comm: &CommConfig, rank: &Rank) -> f64 {
    rows_of(comm, rank).iter().sum()
}

/// Returns the fraction of a rank's expert time that remains where ranks share a processor,
/// relative to the time while all of them are busy. Ranks with fewer rows finish earlier, and the
/// ranks that are left share the processor evenly.
fn processor_share(co_located: &[f64], own: f64, ranks_per_processor: f64) -> f64 {
    if co_located.is_empty() || own == 0.0 {
        return 1.0;
    }
    let until_own: f64 = co_located.iter().map(|rows| rows.min(own)).sum();
    let part = until_own / (co_located.len() as f64 * own);
    // A rank alone cannot use more than one processor's worth of the shared ones.
    part.clamp(1.0 / ranks_per_processor, 1.0)
}

/// Returns the rows of a rank by expert.
fn rows_of(comm: &CommConfig, rank: &Rank) -> Vec<f64> {
    match comm.adaptive_r {
        0 => {
            // Assume as many rows as the rank's tokens have, spread as evenly as those that
            // arrive.
            let experts = comm.plan.tokens.spec.shape.experts;
            vec![rank.rows / experts as f64; experts]
        }
        _ => rank
            .arriving
            .iter()
            .map(|rows| rows * comm.part())
            .collect(),
    }
}

pub(crate) fn cost(
    comm: &CommConfig,
    parts: &PartCosts,
    rank: &Rank,
    PartStep { part, step }: PartStep,
    of_rows: f64,
    multiprocessors: f64,
) -> Cost {
    let machine = comm.machine;
    let alone = |all: f64| LaunchRows {
        all,
        by_expert: &[],
        multiprocessors,
    };
    match part {
        PlanPart::Dispatch => parts.tokens.cost(step, machine, alone(rank.tokens)),
        // A rank without rows for shadows launches nothing.
        PlanPart::Shadows if rank.stay.is_empty() => Cost::default(),
        PlanPart::Shadows => {
            let rows = by_expert(&rank.stay, multiprocessors);
            let shadows = parts.shadows.as_ref();
            shadows.map_or_else(Cost::default, |shadows| shadows.cost(step, machine, rows))
        }
        PlanPart::Shared => {
            let tokens = rank.tokens * comm.mesh.expert_tp as f64;
            let shared = parts.shared.as_ref();
            shared.map_or_else(Cost::default, |shared| {
                shared.cost(step, machine, alone(tokens))
            })
        }
        PlanPart::Experts => {
            let mut rows = rows_of(comm, rank);
            let own = rows.iter().sum();
            let by = processor_share(&parts.co_located, own, machine.compute.ranks_per_processor);
            // Shares follow from the rows of the whole pass; a chunk only scales them.
            rows.iter_mut().for_each(|n| *n *= of_rows);
            let rows = by_expert(&rows, multiprocessors);
            parts.experts.cost(step, machine, rows).times(by)
        }
    }
}

fn by_expert(rows: &[f64], multiprocessors: f64) -> LaunchRows<'_> {
    LaunchRows {
        all: rows.iter().sum(),
        by_expert: rows,
        multiprocessors,
    }
}

pub(crate) fn name(parts: &PartCosts, PartStep { part, step }: PartStep) -> String {
    let launches = match part {
        PlanPart::Dispatch => Some(&parts.tokens),
        PlanPart::Experts => Some(&parts.experts),
        PlanPart::Shared => parts.shared.as_ref(),
        PlanPart::Shadows => parts.shadows.as_ref(),
    };
    launches.map_or_else(String::new, |launches| launches.name(step).to_string())
}

pub(crate) fn whose(part: PlanPart) -> &'static str {
    match part {
        PlanPart::Dispatch => "tokens",
        PlanPart::Experts => "experts",
        PlanPart::Shared => "shared",
        PlanPart::Shadows => "shadows",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four ranks on one processor have a quarter of it each while all are busy.
    #[test]
    fn a_rank_with_more_rows_has_the_processor_to_itself_at_the_end() {
        let of = |co_located: &[f64], own| processor_share(co_located, own, 4.0);
        assert_eq!(of(&[8.0; 4], 8.0), 1.0);
        // Until 2 all are busy; then two have half each, until one is alone.
        let rows = [2.0, 2.0, 4.0, 8.0];
        assert_eq!(of(&rows, 2.0), 1.0);
        assert_eq!(of(&rows, 4.0), (2.0 + 2.0 + 4.0 + 4.0) / 16.0);
        assert_eq!(of(&rows, 8.0), 0.5);
        assert_eq!(of(&[0.0, 0.0, 0.0, 8.0], 8.0), 0.25);
        // Two processors: one rank cannot use both.
        assert_eq!(processor_share(&[0.0, 0.0, 0.0, 8.0], 8.0, 2.0), 0.5);
        assert_eq!(of(&[], 8.0), 1.0);
        assert_eq!(of(&[0.0; 4], 0.0), 1.0);
    }
}
