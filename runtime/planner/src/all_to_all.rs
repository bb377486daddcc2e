//! Corrections of the model by measured steps: [`Machine::all_to_all_factors`].
//!
//! [`Machine::all_to_all_factors`]: crate::Machine::all_to_all_factors

use crate::{AllToAllFactor, PlannerError, Scenario, Simulator};
use moesaic_plan::{Parallel, Strategy};

/// The range of plausible factors. A larger difference has another cause than the all-to-all
/// algorithm.
const POSSIBLE: [f64; 2] = [0.25, 4.0];

/// The distance from a bound below which the search counts as stopped by it.
const AT_BOUND: f64 = 1e-3;

impl AllToAllFactor {
    /// Returns whether no plausible factor explains the measured step: another job ran at the
    /// same time, or the step is too short for rows to dominate it. Such a factor cannot be
    /// compared with those of other algorithms.
    pub fn is_at_bound(&self) -> bool {
        let [least, most] = POSSIBLE;
        self.by <= least * (1.0 + AT_BOUND) || self.by >= most * (1.0 - AT_BOUND)
    }
}

/// The number of bisections; the error that remains is below a millionth of a factor.
const HALVINGS: usize = 24;

/// Returns the factor on the time of rows, for the algorithm and chunks of a strategy, with which
/// the model predicts `seconds` for forward and backward of a step, as measured. The factor is
/// between 0.25 and 4. It is found by bisection, because a step never gets shorter when its rows
/// take longer.
///
/// # Errors
/// [`PlannerError`] for a mesh that is not possible or cannot run this strategy.
pub fn all_to_all_factor(
    scenario: &Scenario,
    mesh: Parallel,
    strategy: Strategy,
    seconds: f64,
) -> Result<AllToAllFactor, PlannerError> {
    let mut scenario = scenario.clone();
    let mut found = AllToAllFactor {
        name: strategy.all_to_all,
        overlap_by: strategy.overlap_by,
        overlap_degree: strategy.overlap_degree.forward,
        message_kib: Simulator::new(&scenario).message(mesh, strategy)?.max(1.0) / 1024.0,
        by: 1.0,
    };
    let mut by = POSSIBLE;
    for _ in 0..HALVINGS {
        // The geometric mean, because factors are ratios: 4 is as far from 1 as 0.25 is.
        found.by = (by[0] * by[1]).sqrt();
        scenario.machine.all_to_all_factors = vec![found];
        let step = Simulator::new(&scenario).predict(mesh, strategy)?;
        by[usize::from(step.both_passes() > seconds)] = found.by;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RoutedRows, published};
    use moesaic_plan::{ShadowModel, Training};
    use moesaic_spec::LayerSpec;

    fn asked() -> (Scenario, Parallel) {
        let text = "shape = { model_dim = 256, hidden_dim = 128, experts = 16, top_k = 2 }";
        let spec = LayerSpec::from_toml(text).unwrap();
        let scenario = Scenario {
            routing: RoutedRows::even(512, 16, 2),
            placement: None,
            shadow_model: ShadowModel::of(&spec),
            spec,
            machine: published("h100-ib").unwrap(),
            world: 16,
            training: Some(Training::default()),
        };
        let mesh = Parallel {
            ep: 16,
            ..Parallel::default()
        };
        (scenario, mesh)
    }

    /// The factor covers the weights of rows too: they travel in messages of their own, within
    /// the measured time.
    #[test]
    fn what_is_sent_with_rows_has_their_factor() {
        let (mut scenario, mesh) = asked();
        let strategy = Strategy::default();
        let passes = |scenario: &Scenario| {
            let found = Simulator::new(scenario).predict(mesh, strategy);
            found.unwrap().both_passes()
        };
        let own = passes(&scenario);
        let of_rows = all_to_all_factor(&scenario, mesh, strategy, own).unwrap();
        let of_less = AllToAllFactor {
            message_kib: of_rows.message_kib / 64.0,
            by: 4.0,
            ..of_rows
        };
        scenario.machine.all_to_all_factors = vec![of_rows, of_less];
        let found = passes(&scenario) / own;
        assert!((found - 1.0).abs() < 1e-6, "{found}");
    }

    #[test]
    fn a_factor_makes_a_step_take_what_was_measured() {
        let (mut scenario, mesh) = asked();
        for text in [
            "default",
            "all_to_all=2dh-inter-first",
            "overlap_degree=4",
            "overlap_degree=4,overlap_by=peers",
        ] {
            let strategy: Strategy = text.parse().unwrap();
            let passes = |scenario: &Scenario| {
                let found = Simulator::new(scenario).predict(mesh, strategy);
                found.unwrap().both_passes()
            };
            let own = passes(&scenario);
            for part in [0.95, 1.0, 1.3] {
                let by = all_to_all_factor(&scenario, mesh, strategy, part * own).unwrap();
                scenario.machine.all_to_all_factors = vec![by];
                let found = passes(&scenario) / own;
                assert!((found / part - 1.0).abs() < 1e-6, "{text} {by:?}: {found}");
                scenario.machine.all_to_all_factors.clear();
            }
            let of = |seconds| {
                all_to_all_factor(&scenario, mesh, strategy, seconds)
                    .unwrap()
                    .by
            };
            assert!((of(1e3) / 4.0 - 1.0).abs() < 1e-6);
            assert!((of(0.0) / 0.25 - 1.0).abs() < 1e-6);
            for (seconds, at_bound) in [(own, false), (1e3, true), (0.0, true)] {
                let found = all_to_all_factor(&scenario, mesh, strategy, seconds).unwrap();
                assert_eq!(found.is_at_bound(), at_bound, "{text} {found:?}");
            }
        }
    }
}
