//! Capacity: the options that act under each mode.

use super::{Conflict, Range, Real, quoted};
use crate::{
    Capacity, CapacityMode, CapacityOrder, Chooser, LayerSpec, MAX_ALIGN, MAX_CAPACITY_FACTOR,
    MAX_CAPACITY_ROWS, Problem,
};

pub(super) fn check(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let capacity = &spec.capacity;
    let given = capacity.has_factor() || capacity.factor != 1.0;
    let given = given.then_some(capacity.factor);
    factor(capacity, "capacity.factor", given, problems);
    factor(
        capacity,
        "capacity.eval_factor",
        capacity.eval_factor,
        problems,
    );
    rows(&spec.capacity, problems);
    order(&spec.capacity, problems);
    importance(spec, problems);
    align(&spec.capacity, problems);
    if spec.capacity.renormalize_after_drop && !spec.may_drop() {
        problems.push(idle(
            &spec.capacity,
            "capacity.renormalize_after_drop",
            "true".to_string(),
            "nothing is ever dropped",
            "use a mode that drops: \"factor\", \"fixed\" or \"bounded\"",
        ));
    }
}

/// Returns the problem of an option without effect under the mode. `instead` is the other remedy.
fn idle(capacity: &Capacity, key: &str, value: String, because: &str, instead: &str) -> Problem {
    let name = key.trim_start_matches("capacity.");
    let conflict = Conflict {
        key,
        value,
        with: "capacity.mode",
        with_value: quoted(&capacity.mode),
        because,
        change: format!("remove `{name}`, or {instead}"),
    };
    conflict.problem()
}

fn factor(capacity: &Capacity, key: &str, value: Option<f64>, problems: &mut Vec<Problem>) {
    let Some(value) = value else {
        return;
    };
    if !capacity.has_factor() {
        let because = "used by modes \"factor\" and \"bounded\" only";
        let instead = "set mode = \"factor\" or \"bounded\"";
        problems.push(idle(capacity, key, format!("{value:?}"), because, instead));
        return;
    }
    let before = problems.len();
    Real::Any.check(key, value, problems);
    if problems.len() > before {
        // The range of factors is narrower than that of other numbers.
        let range = format!("0, or a number from 1.2e-38 to {MAX_CAPACITY_FACTOR}, of either sign");
        let help = format!("use {range}");
        let own = problems.pop();
        problems.extend(own.map(|problem| problem.help(help).range(range)));
        return;
    }
    if value.abs() > MAX_CAPACITY_FACTOR {
        let message = format!("`{key}` = {value:?} is out of range");
        let help = "a factor equal to the number of experts already gives every assignment a row; \
                    for no limit use mode = \"dropless\"";
        let range = format!("between -{MAX_CAPACITY_FACTOR} and {MAX_CAPACITY_FACTOR}");
        let problem = Problem::new(key, message).label(format!("must be {range}"));
        problems.push(problem.help(help).range(range));
    }
}

fn rows(capacity: &Capacity, problems: &mut Vec<Problem>) {
    let key = "capacity.rows";
    match (capacity.mode == CapacityMode::Fixed, capacity.rows) {
        (true, None) => {
            let message = "`capacity.mode` = \"fixed\" needs `capacity.rows`";
            let problem = Problem::new("capacity.mode", message)
                .label("needs `rows`")
                .with(key, "missing");
            problems.push(problem.help("add rows = 64, the rows every expert has"));
        }
        (true, Some(value)) => Range {
            key,
            value,
            least: 1,
            most: MAX_CAPACITY_ROWS,
            because: "the largest row number that locations, which are i32, can hold",
        }
        .check(problems),
        (false, Some(value)) => {
            let because = "used by mode \"fixed\" only";
            let instead = "set mode = \"fixed\"";
            problems.push(idle(capacity, key, value.to_string(), because, instead));
        }
        (false, None) => {}
    }
}

fn order(capacity: &Capacity, problems: &mut Vec<Problem>) {
    let by_place = matches!(
        capacity.order,
        CapacityOrder::SlotMajor | CapacityOrder::TokenMajor
    );
    if capacity.mode == CapacityMode::Dropless && !by_place {
        let because = "everyone is served, so no one comes first";
        let value = quoted(&capacity.order);
        let instead = "set a mode with a capacity, such as \"factor\"";
        problems.push(idle(capacity, "capacity.order", value, because, instead));
    }
}

/// Refuses an order by score with an external router, which passes no scores.
fn importance(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let (order, kind) = (spec.capacity.order, spec.router.kind);
    if order != CapacityOrder::BatchPrioritized || kind.chooser() != Chooser::Caller {
        return;
    }
    let conflict = Conflict {
        key: "capacity.order",
        value: quoted(&order),
        with: "router.kind",
        with_value: quoted(&kind),
        because: "tokens are ranked by router scores, and there are none",
        change: "use order = \"probability\", which goes by the weights that the caller passes"
            .to_string(),
    };
    problems.push(conflict.problem());
}

fn align(capacity: &Capacity, problems: &mut Vec<Problem>) {
    let (key, value) = ("capacity.align", capacity.align);
    if capacity.mode == CapacityMode::Dropless && value > 1 {
        let because = "there is no capacity to round up";
        let instead = "set a mode with a capacity, such as \"factor\"";
        problems.push(idle(capacity, key, value.to_string(), because, instead));
        return;
    }
    Range {
        key,
        value,
        least: 1,
        most: MAX_ALIGN,
        because: "the largest alignment of rows",
    }
    .check(problems);
}
