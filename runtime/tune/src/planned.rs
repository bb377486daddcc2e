//! Predictions by the planner.

use crate::{CallKind, Loads, Predict, PredictedTime, RowBucket, TunerKey};
use moesaic_engine::{Layer, Mesh};
use moesaic_plan::{CommDtype, Parallel, Strategy, most_rows};
use moesaic_planner::{Machine, PlannerError, RoutedRows, Scenario, Simulator, Space};
use moesaic_spec::{CapacityMode, LayerSpec};

/// The inputs of the planner besides the layer. It simulates every strategy that a tuner could
/// choose, on a model of the machine.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The machine, calibrated where possible ([`moesaic_planner::Calibration`]). The ranks per
    /// node and the target come from the layer.
    pub machine: Machine,
    /// The allowed types of rows between nodes. More than one changes results, by rounding.
    pub comm_dtypes: Vec<CommDtype>,
}

impl Planned {
    /// Returns inputs with uncast rows.
    pub fn of(machine: Machine) -> Planned {
        Planned {
            machine,
            comm_dtypes: vec![CommDtype::Unchanged],
        }
    }

    /// Returns a predictor for a layer. It covers every strategy that the ranks can run
    /// ([`Layer::check_strategy`]) and that fits in memory, with the rows of the step that is
    /// about to begin; of more than 64 ranks, each is assumed to have the mean. Experts are where
    /// the layer's placement has them, and may have shadows where some have more rows than
    /// others. Forward and backward are simulated separately, and the combination of the best of
    /// each is one more candidate; an evaluation has the forward pass alone. Sums of gradients
    /// over ranks are excluded, because no step of an [`LayerTuner`](crate::LayerTuner) has
    /// any.
    ///
    /// # Errors
    /// [`PlannerError`] where not even the default strategy can be simulated.
    pub fn predict(self, layer: &Layer) -> Result<Predict, PlannerError> {
        let forecast = Forecast::new(self, layer);
        let calls = match layer.plan().training {
            Some(_) => CallKind::Training,
            None => CallKind::Evaluation,
        };
        forecast.of((calls, RowBucket::of(1, None)), &forecast.even())?;
        // Simulations for one number of tokens share plans with those for others.
        Ok(Box::new(move |key: &TunerKey, loads: &Loads| {
            forecast
                .of((key.calls, key.rows), loads)
                .unwrap_or_default()
        }))
    }
}

/// The inputs of a simulation except the rows.
struct Forecast {
    scenario: Scenario,
    mesh: Parallel,
    strategies: Vec<Strategy>,
}

impl Forecast {
    fn new(planned: Planned, layer: &Layer) -> Forecast {
        let own = layer.plan();
        let of_mesh = layer.mesh();
        let mesh = of_mesh.map(Mesh::parallel).unwrap_or_default();
        let each = of_mesh.and_then(|mesh| per_node(mesh.hosts()));
        let mut machine = planned.machine;
        machine.target = own.target;
        if let Some(each) = each {
            machine = machine.with_per_node(each);
        }
        let space = Space {
            comm_dtypes: planned.comm_dtypes,
            ..Space::default()
        };
        let all = space.strategies(mesh, each.is_some()).into_iter();
        let can = |strategy: &Strategy| layer.check_strategy(*strategy).is_ok();
        Forecast {
            mesh,
            strategies: all.filter(can).collect(),
            scenario: Scenario {
                spec: own.spec.clone(),
                machine,
                world: mesh.ranks(),
                training: own.training,
                routing: RoutedRows::even(0, own.spec.shape.experts, own.spec.shape.top_k),
                placement: of_mesh.and_then(Mesh::placement).cloned(),
                shadow_model: layer.shadow_model(),
            },
        }
    }

    /// Returns one token of each rank for every expert.
    fn even(&self) -> Loads {
        vec![vec![1; self.scenario.spec.shape.experts]; self.mesh.ranks()]
    }

    /// Returns the predictions for the loads of a step under a key.
    fn of(
        &self,
        (calls, rows): (CallKind, RowBucket),
        loads: &Loads,
    ) -> Result<Vec<PredictedTime>, PlannerError> {
        let (shape, ranks) = (&self.scenario.spec.shape, self.mesh.ranks());
        let mean = (ranks > MOST_APART).then(|| mean(loads, ranks));
        let loads = mean.as_ref().unwrap_or(loads);
        let routing = RoutedRows::counted(ranks, shape.experts, shape.top_k, loads);
        let mut scenario = Scenario {
            routing: routing?,
            training: self.scenario.training.filter(|_| calls.train()),
            ..self.scenario.clone()
        };
        let hot = !scenario.routing.is_even();
        set_capacity(&mut scenario.spec, (calls, rows));
        let simulator = Simulator::new(&scenario);
        simulator.predict(self.mesh, Strategy::default())?;
        let limit = scenario.machine.compute.memory_gib * f64::from(1u32 << 30);
        let seconds = |strategy: Strategy| {
            // A strategy that cannot be simulated gets no prediction.
            let found = simulator.predict(self.mesh, strategy).ok()?;
            let of = |name| found.passes.iter().find(|pass| pass.name == name);
            let seconds = |name| of(name).map_or(0.0, |pass| pass.seconds);
            let fits = found.memory.bytes() <= limit;
            fits.then(|| (strategy, [seconds("forward"), seconds("backward")]))
        };
        let alike: Vec<Timed> = self
            .strategies
            .iter()
            .copied()
            .filter(|strategy| hot || strategy.shadows == 0)
            .filter_map(seconds)
            .collect();
        let mixed = match calls {
            CallKind::Training => mixed(&alike, &self.mesh),
            CallKind::Evaluation => Vec::new(), // there is one pass
        };
        let mixed = mixed.into_iter().filter_map(seconds);
        let all = alike.iter().copied().chain(mixed);
        Ok(all
            .map(|(strategy, [forward, backward])| PredictedTime {
                strategy,
                seconds: forward + backward,
            })
            .collect())
    }
}

/// The most ranks that are simulated with their own rows; of more, each gets the mean. The time
/// to simulate distinct ranks grows with the square of their number.
const MOST_APART: usize = 64;

/// Returns the mean of all ranks, for each rank.
fn mean(loads: &Loads, ranks: usize) -> Loads {
    let experts = loads.first().map_or(0, Vec::len);
    let of = |expert| {
        let rows = loads.iter().filter_map(|rows| rows.get(expert));
        rows.sum::<u64>().div_ceil(loads.len() as u64)
    };
    vec![(0..experts).map(of).collect(); ranks]
}

/// Sets the capacity of these rows, where a call has chosen another than the layer's own.
fn set_capacity(spec: &mut LayerSpec, (calls, rows): (CallKind, RowBucket)) {
    let RowBucket::Capped { capacity, .. } = rows else {
        return;
    };
    let own = most_rows(spec, spec.capacity.factor_of(calls.train()), rows.tokens());
    let most = usize::try_from(rows.tokens()).unwrap_or(usize::MAX);
    if RowBucket::of(most, own) != rows {
        spec.capacity.mode = CapacityMode::Fixed;
        spec.capacity.rows = usize::try_from(RowBucket::middle(capacity)).ok();
    }
}

/// A strategy and the seconds of its passes.
type Timed = (Strategy, [f64; 2]);

/// Returns, for each set of strategies that agree in everything else, the best forward pass
/// combined with the best backward pass.
fn mixed(timed: &[Timed], mesh: &Parallel) -> Vec<Strategy> {
    let alike = |a: &Timed, b: &Timed| a.0.shared() == b.0.shared();
    let mixed = timed.chunk_by(alike).filter_map(|same| {
        let best = |pass: usize| same.iter().min_by(|a, b| a.1[pass].total_cmp(&b.1[pass]));
        let (forward, backward) = (best(0)?.0, best(1)?.0);
        let strategy = forward.with_backward_of(backward);
        (forward != backward && strategy.check(mesh).is_ok()).then_some(strategy)
    });
    mixed.collect()
}

/// Returns the ranks per node, where all nodes have equally many consecutive ranks.
fn per_node(hosts: &[String]) -> Option<usize> {
    let mut runs = hosts.chunk_by(|a, b| a == b).map(<[String]>::len);
    let first = runs.next()?;
    runs.all(|run| run == first).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_runs_of_equal_length() {
        let of = |names: &str| per_node(&names.chars().map(String::from).collect::<Vec<_>>());
        assert_eq!(of("aabb"), Some(2));
        assert_eq!(of("aaa"), Some(3));
        assert_eq!(of("aab"), None);
        assert_eq!(of(""), None);
    }

    #[test]
    fn of_many_ranks_each_has_the_mean() {
        assert_eq!(mean(&vec![vec![1, 0], vec![4, 2]], 3), vec![vec![3, 1]; 3]);
        assert_eq!(mean(&vec![], 2), vec![Vec::<u64>::new(); 2]);
    }

    #[test]
    fn a_capacity_that_a_call_has_chosen_is_predicted_with() {
        let text = "shape = { model_dim = 8, hidden_dim = 8, experts = 8, top_k = 2 }
             capacity = { mode = 'factor', factor = 1.0 }";
        let spec = LayerSpec::from_toml(text).expect("a layer");
        let with = |rows: RowBucket| {
            let mut spec = spec.clone();
            set_capacity(&mut spec, (CallKind::Training, rows));
            most_rows(&spec, spec.capacity.factor, rows.tokens())
        };
        // 1,024 tokens, 128 for each expert, two choices.
        let own = most_rows(&spec, 1.0, 1024);
        assert_eq!(with(RowBucket::of(1000, own)), Some(256));
        assert_eq!(with(RowBucket::of(1000, Some(700))), Some(5 * 128 + 64));
        assert_eq!(with(RowBucket::of(1000, None)), Some(256));
    }

    #[test]
    fn the_best_of_both_passes_are_put_together() {
        let of = |text: &str, forward, backward| {
            let strategy: Strategy = text.parse().expect("a strategy");
            (strategy, [forward, backward])
        };
        let mesh = Parallel::default();
        let passes = [
            of("overlap_degree=2", 1.0, 4.0),
            of("overlap_degree=4", 2.0, 3.0),
            of("all_to_all=dedup", 1.5, 0.5),
        ];
        let found: Vec<String> = mixed(&passes, &mesh)
            .iter()
            .map(Strategy::to_string)
            .collect();
        assert_eq!(found, ["overlap_degree=2/4"]);
        // Chunks of both passes that do not fit each other are not combined.
        let apart = [
            of("overlap_degree=63", 1.0, 4.0),
            of("overlap_degree=64", 2.0, 3.0),
        ];
        assert_eq!(mixed(&apart, &mesh), []);
    }
}
