//! By how much steps that were measured differ from what links say: [`Machine::routes`].
//!
//! [`Machine::routes`]: crate::Machine::routes

use crate::{PlannerError, Question, RouteFactor, Simulator};
use moesaic_plan::{Parallel, Route, Strategy};

/// The same for any size.
fn factor(name: Route, by: f64) -> RouteFactor {
    RouteFactor { name, kib: 1.0, by }
}

/// What a factor may be: beyond it something else than the route is not understood.
const POSSIBLE: std::ops::RangeInclusive<f64> = 0.25..=4.0;

/// So many times as long rows have to take by a route that forward and backward of a step with
/// that route alone take `seconds`, as they were measured to; at least a quarter, at most four
/// times. Of two predictions, since what a step takes grows with the factor in a line.
///
/// # Errors
/// [`PlannerError`] for a mesh that cannot be, or has no such route.
pub fn route_factor(
    question: &Question,
    mesh: Parallel,
    route: Route,
    seconds: f64,
) -> Result<f64, PlannerError> {
    let strategy = Strategy {
        route,
        ..Strategy::default()
    };
    let with = |by: f64| -> Result<f64, PlannerError> {
        let mut question = question.clone();
        question.machine.routes = vec![factor(route, by)];
        Ok(Simulator::new(&question)
            .predict(mesh, strategy)?
            .both_passes())
    };
    let (once, twice) = (with(1.0)?, with(2.0)?);
    let by = 1.0 + (seconds - once) / (twice - once).max(f64::MIN_POSITIVE);
    Ok(by.clamp(*POSSIBLE.start(), *POSSIBLE.end()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Routing, published};
    use moesaic_plan::{ShadowModel, Training};
    use moesaic_spec::LayerSpec;

    #[test]
    fn a_factor_makes_a_step_take_what_was_measured() {
        let text = "shape = { model_dim = 256, hidden_dim = 128, experts = 16, top_k = 2 }";
        let spec = LayerSpec::from_toml(text).unwrap();
        let mut question = Question {
            routing: Routing::even(512, 16, 2),
            shadow_model: ShadowModel::of(&spec),
            spec,
            machine: published("dgx-h100-ib").unwrap(),
            world: 16,
            training: Some(Training::default()),
        };
        let mesh = Parallel {
            ep: 16,
            ..Parallel::default()
        };
        for route in [Route::Linear, Route::InterFirst, Route::Once] {
            let strategy = Strategy {
                route,
                ..Strategy::default()
            };
            let passes = |question: &Question| {
                let found = Simulator::new(question).predict(mesh, strategy).unwrap();
                found.passes[0].seconds + found.passes[1].seconds
            };
            let own = passes(&question);
            for part in [0.9, 1.0, 1.3] {
                let by = route_factor(&question, mesh, route, part * own).unwrap();
                question.machine.routes = vec![factor(route, by)];
                assert!((passes(&question) / own / part - 1.0).abs() < 1e-9, "{by}");
                question.machine.routes.clear();
            }
            assert_eq!(route_factor(&question, mesh, route, 1e3).unwrap(), 4.0);
            assert_eq!(route_factor(&question, mesh, route, 0.0).unwrap(), 0.25);
        }
    }
}
