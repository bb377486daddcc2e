//! What launches of each side cost a rank.

use crate::cost::{Cost, Launches, Rows};
use crate::geometry::Rank;
use crate::ways::Travel;
use moesaic_plan::{LayerPlan, Side, Step};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// Costs of the launches of each side, in one pass.
pub(crate) struct Sides {
    tokens: Rc<Launches>,
    experts: Rc<Launches>,
    shared: Option<Rc<Launches>>,
    shadows: Option<Rc<Launches>>,
}

/// Costs of the launches of a plan's passes, for a range of rows each.
pub(crate) type Costs = RefCell<HashMap<(Side, &'static str, [u64; 2]), Rc<Launches>>>;

/// A pass: its steps, and those of each side's plan.
pub(crate) type StepsOf = fn(&LayerPlan) -> &[Step];

/// Pieces have at least a part `least` of the rows.
pub(crate) fn sides(
    ranks: &[Rank],
    travel: &Travel,
    pass: &'static str,
    of: StepsOf,
    least: f64,
) -> Sides {
    let range = |rows: &dyn Fn(&Rank) -> f64| {
        let each = ranks.iter().map(rows);
        each.fold((f64::INFINITY, 0.0f64), |(low, high), n| {
            (low.min(n), high.max(n))
        })
    };
    let plan = travel.plan;
    let made = |side: Side, (few, many): (f64, f64)| {
        let key = (side, pass, [few, many].map(f64::to_bits));
        let mut costs = travel.costs.borrow_mut();
        let make = || {
            let plan = plan.side(side);
            Rc::new(Launches::new(plan, of(plan), travel.machine, few, many))
        };
        Rc::clone(costs.entry(key).or_insert_with(make))
    };
    let tokens = range(&|rank| rank.tokens);
    let (few, many) = range(&|rank| rows_of(travel, rank).iter().sum::<f64>());
    let shards = travel.mesh.shards as f64;
    let neighbours = (tokens.0 * shards, tokens.1 * shards);
    Sides {
        tokens: made(Side::Tokens, tokens),
        experts: made(Side::Experts, (few * least, many)),
        shared: plan
            .shared
            .is_some()
            .then(|| made(Side::Shared, neighbours)),
        shadows: plan
            .shadows
            .is_some()
            .then(|| made(Side::Shadows, range(&|rank| rank.stay.iter().sum()))),
    }
}

/// Rows of a rank by expert.
fn rows_of(travel: &Travel, rank: &Rank) -> Vec<f64> {
    match travel.ways {
        0 => {
            // As many as its tokens have, as evenly as those that arrive.
            let experts = travel.plan.tokens.spec.shape.experts;
            vec![rank.rows / experts as f64; experts]
        }
        _ => rank
            .arriving
            .iter()
            .map(|rows| rows * travel.part())
            .collect(),
    }
}

pub(crate) fn cost(
    travel: &Travel,
    sides: &Sides,
    rank: &Rank,
    (side, step): (Side, usize),
    part: f64,
    multiprocessors: f64,
) -> Cost {
    let machine = travel.machine;
    let alone = |all: f64| Rows {
        all,
        by_expert: &[],
        multiprocessors,
    };
    match side {
        Side::Tokens => sides.tokens.cost(step, machine, alone(rank.tokens)),
        // Nothing is launched where no expert has one.
        Side::Shadows if rank.stay.is_empty() => Cost::default(),
        Side::Shadows => {
            let rows = by_expert(&rank.stay, multiprocessors);
            let shadows = sides.shadows.as_ref();
            shadows.map_or_else(Cost::default, |shadows| shadows.cost(step, machine, rows))
        }
        Side::Shared => {
            let tokens = rank.tokens * travel.mesh.shards as f64;
            let shared = sides.shared.as_ref();
            shared.map_or_else(Cost::default, |shared| {
                shared.cost(step, machine, alone(tokens))
            })
        }
        Side::Experts => {
            let rows: Vec<f64> = rows_of(travel, rank).iter().map(|n| n * part).collect();
            let rows = by_expert(&rows, multiprocessors);
            sides.experts.cost(step, machine, rows)
        }
    }
}

fn by_expert(rows: &[f64], multiprocessors: f64) -> Rows<'_> {
    Rows {
        all: rows.iter().sum(),
        by_expert: rows,
        multiprocessors,
    }
}

pub(crate) fn name(sides: &Sides, (side, step): (Side, usize)) -> String {
    let launches = match side {
        Side::Tokens => Some(&sides.tokens),
        Side::Experts => Some(&sides.experts),
        Side::Shared => sides.shared.as_ref(),
        Side::Shadows => sides.shadows.as_ref(),
    };
    launches.map_or_else(String::new, |launches| launches.name(step).to_string())
}

pub(crate) fn whose(side: Side) -> &'static str {
    match side {
        Side::Tokens => "tokens",
        Side::Experts => "experts",
        Side::Shared => "shared",
        Side::Shadows => "shadows",
    }
}
