//! An adaptive layer compared with every static choice, on simulated steps. The tuner's
//! predictions use a published machine. The steps use a machine that is slower and faster in
//! places, so predictions are wrong.
//!
//! ```sh
//! cargo test --release -p moesaic-tune --test gains -- --nocapture   # the table of
//! docs/SCALE.md
//! ```

use moesaic_plan::{Parallel, ShadowModel, Strategy, Training};
use moesaic_planner::{Machine, RoutedRows, Scenario, Simulator, published};
use moesaic_spec::LayerSpec;
use moesaic_tune::{
    CallKind, PredictedTime, RowBucket, StrategySpace, Times, Tuner, TunerKey, TunerOptions, What,
};
use std::collections::BTreeMap;

/// A layer on ranks of Tutel's machine.
#[derive(Clone, Copy)]
struct Config {
    number: usize,
    world: usize,
    expert_tp: usize,
    tokens: u64,
    dims: [usize; 2],
    top_k: usize,
    zipf: f64,
}

fn configs() -> Vec<Config> {
    let mut list = Vec::new();
    for world in [16, 32, 64] {
        for expert_tp in [1, 4] {
            for tokens in [256, 2048, 16384] {
                for (dims, top_k, zipf) in [
                    ([1024, 1024], 1, 0.0),
                    ([1024, 4096], 2, 0.0),
                    ([2048, 2048], 2, 0.0),
                    ([4096, 1024], 4, 0.0),
                    ([4096, 8192], 1, 0.0),
                    ([2048, 1024], 2, 0.8),
                ] {
                    list.push(Config {
                        number: list.len(),
                        world,
                        expert_tp,
                        tokens,
                        dims,
                        top_k,
                        zipf,
                    });
                }
            }
        }
    }
    list
}

/// Returns a number from 0 to 1 for each seed.
fn drawn(seed: usize) -> f64 {
    let mixed = (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9) as f64 / u64::MAX as f64
}

/// Returns the machine with every figure changed by up to a third in either direction.
fn other(mut machine: Machine, number: usize) -> Machine {
    let mut seed = 100 * number;
    let mut off = |value: &mut f64| {
        *value *= (4.0f64 / 3.0).powf(2.0 * drawn(seed) - 1.0);
        seed += 1;
    };
    for level in &mut machine.levels {
        off(&mut level.alpha_us);
        off(&mut level.bandwidth_gbs);
        off(&mut level.half_size_kib);
    }
    off(&mut machine.compute.memory_gbs);
    machine.compute.gemm_tflops.values_mut().for_each(&mut off);
    machine
}

impl Config {
    fn mesh(&self) -> Parallel {
        Parallel {
            ep: self.world / self.expert_tp,
            expert_tp: self.expert_tp,
            ..Parallel::default()
        }
    }

    fn scenario(&self, machine: Machine) -> Scenario {
        let (ep, [width, hidden]) = (self.mesh().ep, self.dims);
        let text = format!(
            "shape = {{ model_dim = {width}, hidden_dim = {hidden}, experts = {ep}, top_k = {} }}
             precision = {{ weights = 'f16', activations = 'f16' }}",
            self.top_k
        );
        let spec = LayerSpec::from_toml(&text).expect("a layer");
        Scenario {
            shadow_model: ShadowModel::of(&spec),
            spec,
            machine,
            world: self.world,
            training: Some(Training::default()),
            routing: RoutedRows::zipf(self.tokens, ep, self.top_k, self.zipf).expect("counts"),
            placement: None,
        }
    }

    /// Returns the seconds of both passes by strategy.
    fn times(&self, machine: Machine) -> Vec<(Strategy, Times)> {
        let (scenario, mesh) = (self.scenario(machine), self.mesh());
        let simulator = Simulator::new(&scenario);
        let space = moesaic_planner::Space::default();
        let all = space
            .strategies(mesh, simulator.has_nodes(mesh))
            .into_iter();
        let all = all.filter(|strategy| strategy.check(&mesh).is_ok());
        all.map(|strategy| {
            let found = simulator.predict(mesh, strategy).expect("a prediction");
            let [forward, backward] = [0, 1].map(|pass| found.passes[pass].seconds);
            (strategy, Times { forward, backward })
        })
        .collect()
    }

    /// Returns the kept strategy's seconds and the number of steps.
    fn chosen(&self, predicted: &[(Strategy, Times)], real: &[(Strategy, Times)]) -> (f64, usize) {
        let mut tuner = Tuner::new(TunerOptions::default(), StrategySpace::of(self.mesh(), 8));
        let key = TunerKey {
            machine: "simulated".to_string(),
            layer: self.number.to_string(),
            calls: CallKind::Training,
            rows: RowBucket::of(self.tokens as usize, None),
        };
        let predictions = predicted.iter().map(|(strategy, times)| PredictedTime {
            strategy: *strategy,
            seconds: times.sum(),
        });
        let predictions: Vec<PredictedTime> = predictions.collect();
        for step in 0.. {
            let strategy = tuner.choose(&key, || predictions.clone());
            let kept =
                |event: &moesaic_tune::TunerDecision| matches!(event.what, What::Kept { .. });
            let times = of(real, strategy);
            if tuner.events().iter().any(kept) {
                return (times.sum(), step);
            }
            tuner.observe(&key, strategy, times);
        }
        unreachable!("the loop has no end")
    }
}

/// Returns the times of a strategy. A pass depends on its own chunks alone, so any two passes
/// make a step.
fn of(real: &[(Strategy, Times)], strategy: Strategy) -> Times {
    let with = |overlap_degree: usize| {
        let same = |s: &Strategy| {
            let alike = (s.shared(), s.comm_dtype) == (strategy.shared(), strategy.comm_dtype);
            alike && s.overlap_degree.forward == overlap_degree
        };
        real.iter()
            .find(|(s, _)| same(s))
            .expect("it was simulated")
            .1
    };
    Times {
        forward: with(strategy.overlap_degree.forward).forward,
        backward: with(strategy.overlap_degree.backward).backward,
    }
}

#[test]
fn what_adapts_is_hardly_ever_behind_a_static_choice() {
    let machine = published("ndm-a100-v4").expect("Tutel's machine");
    let (mut each, mut count) = (BTreeMap::<(usize, String), Vec<f64>>::new(), 0);
    let (mut most, mut far, mut worst_text) = (0, 0.0f64, String::new());
    for config in configs() {
        let predicted = config.times(machine.clone());
        let real = config.times(other(machine.clone(), config.number));
        let (chosen, steps) = config.chosen(&predicted, &real);
        let best = real.iter().map(|(_, times)| times.sum());
        let best = best.fold(f64::INFINITY, f64::min);
        if chosen / best - 1.0 > far {
            far = chosen / best - 1.0;
            worst_text = format!(
                "{} ranks, {} tokens, {:?}",
                config.world, config.tokens, config.dims
            );
        }
        (most, count) = (most.max(steps), count + 1);
        for (strategy, times) in &real {
            let gain = times.sum() / chosen - 1.0;
            let name = strategy.to_string();
            each.entry((config.world, name)).or_default().push(gain);
        }
    }
    println!(
        "{count} layers; adaptive at most {:.1} % behind the best static choice of each ({worst_text})",
        100.0 * far
    );
    println!("and found with at most {most} steps. How much longer static choices take:");
    for ((world, name), gains) in &each {
        let mean = gains.iter().sum::<f64>() / gains.len() as f64;
        let largest = gains.iter().copied().fold(0.0, f64::max);
        println!(
            "{world:>4} GPUs, {name:<20} {:>6.0} % on average, {:>6.0} % at most, of {}",
            100.0 * mean,
            100.0 * largest,
            gains.len()
        );
    }
    assert!(count >= 100);
    assert!(
        most <= 6 * 4 + 3 * 6,
        "six candidates, four steps each, and six more of three: {most}"
    );
    assert!(far <= 0.03, "{far} behind: {worst_text}");
}
