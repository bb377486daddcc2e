//! Strategies of drawn layers under MPI, in turns.

use crate::drawn::{Drawn, RANKS};
use crate::{Result, compared, data};
use moesaic::collectives::{Call, Collectives, Communicator, mpi};
use moesaic::planner::{self, Machine};
use moesaic::tune::{LayerTuner, Planned, StrategySpace, Times, Tuner, TunerOptions, What};
use moesaic::{
    DType, Engine, EngineOptions, Input, Layer, LayerOptions, Mesh, RngKey, Strategy, Tensor,
};
use moesaic::{Parallel, Training};
use serde_json::json;
use std::ops::RangeInclusive;
use std::time::Instant;

/// A rank of a world of MPI.
pub struct Rank {
    pub engine: Engine,
    pub world: Communicator,
}

/// Seconds of forward and of backward.
pub type Passes = [f64; 2];

impl Rank {
    pub fn start() -> Result<Rank> {
        let options = EngineOptions {
            threads: Some(1),
            ..EngineOptions::default()
        };
        let engine = Engine::open("cpu", options)?;
        let world = mpi::start(&mpi::MpiOptions::default(), engine.device().clone())?;
        match world.size() {
            RANKS => Ok(Rank { engine, world }),
            other => Err(format!("{other} ranks, and layers are for {RANKS}").into()),
        }
    }

    pub fn layer(&mut self, mesh: &Mesh, drawn: &Drawn) -> Result<Layer> {
        let spec = drawn.spec()?;
        let weights = data::weights(&spec, DType::F32);
        let training = Some(Training::default());
        Ok(self
            .engine
            .layer_with(&spec, &weights, LayerOptions::over(mesh).training(training))?)
    }

    pub fn mesh(&mut self, parallel: Parallel) -> Result<Mesh> {
        Ok(Mesh::new(&mut self.world, parallel)?)
    }

    /// All begin at once: who comes late to the first is awake at the second.
    pub fn meet(&mut self) -> Result {
        for _ in 0..2 {
            self.world.barrier(&Call::new("begin"))?.wait()?;
        }
        Ok(())
    }

    /// The passes of each round as far as its last rank ([`Times::of_last`]).
    pub fn slowest(&mut self, own: &[Passes]) -> Result<Vec<Passes>> {
        let ends = own.iter().flat_map(|[forward, backward]| {
            let (forward, backward) = (*forward, *backward);
            Times { forward, backward }.ends()
        });
        let bytes: Vec<u8> = ends.flat_map(f64::to_le_bytes).collect();
        let all = self.world.gather_bytes(&bytes, &Call::new("times"))?;
        let number = |times: &Vec<u8>, at: usize| f64::from_le_bytes(times.as_chunks::<8>().0[at]);
        let most = |at: usize| {
            all.iter()
                .map(|times| number(times, at))
                .fold(0.0, f64::max)
        };
        let passes = (0..own.len()).map(|i| {
            let last = Times::of_last([most(2 * i), most(2 * i + 1)]);
            [last.forward, last.backward]
        });
        Ok(passes.collect())
    }

    pub fn say(&self, line: &str) {
        if self.world.rank() == 0 {
            println!("{line}");
        }
    }

    pub fn finish(self) -> Result {
        Ok(self.world.finish(&Call::new("end"))?)
    }
}

pub fn run(numbers: RangeInclusive<u64>, rounds: usize, machine: Option<Machine>) -> Result {
    let mut rank = Rank::start()?;
    for number in numbers {
        one(&mut rank, &Drawn::new(number), rounds, machine.as_ref())?;
    }
    rank.finish()
}

/// Measures the layer that chooses, and finals, once more beside the strategies
/// of earlier lines.
pub fn again(lines: &str, machine: &Machine) -> Result {
    let mut rank = Rank::start()?;
    for (number, measured) in compared::measured(lines)? {
        let drawn = Drawn::new(number);
        rank.say(&format!("# {drawn}"));
        let mesh = rank.mesh(drawn.mesh)?;
        let layer = rank.layer(&mesh, &drawn)?;
        choose(&mut rank, &drawn, layer, (measured, machine))?;
    }
    rank.finish()
}

fn one(rank: &mut Rank, drawn: &Drawn, rounds: usize, machine: Option<&Machine>) -> Result {
    rank.say(&format!("# {drawn}"));
    let mesh = rank.mesh(drawn.mesh)?;
    let mut layer = rank.layer(&mesh, drawn)?;
    let own = rank.world.rank();
    let (input, dy) = (drawn.input(own), drawn.output_gradient(own));
    let mut space = planner::Space {
        comm_dtypes: vec![drawn.comm_dtype],
        ..planner::Space::default()
    };
    if drawn.zipf() == 0.0 {
        space.shadows = vec![0];
    }
    let all = space.strategies(drawn.mesh, true).into_iter();
    let mut all: Vec<Strategy> = all.filter(|s| layer.check_strategy(*s).is_ok()).collect();
    if let Some(machine) = machine {
        all = worth_it(drawn, &all, machine)?;
    }
    let all = (&all[..], rounds, "strategy");
    let measured = in_turns(rank, drawn, &mut layer, all, (&input, &dy))?;
    let Some(machine) = machine else {
        return Ok(());
    };
    choose(rank, drawn, layer, (measured, machine))
}

/// Strategies are measured that are predicted to take at most this many times
/// as long as the fastest. The others would take most of the time.
const WORTH: f64 = 4.0;

fn worth_it(drawn: &Drawn, all: &[Strategy], machine: &Machine) -> Result<Vec<Strategy>> {
    let each = predicted(drawn, all, machine)?;
    let least = each.iter().map(|(_, seconds)| *seconds);
    let least = least.fold(f64::INFINITY, f64::min);
    let kept = each.into_iter().filter(|(_, s)| *s <= WORTH * least);
    Ok(kept.map(|(strategy, _)| strategy).collect())
}

/// Each with the seconds of a step that the planner says.
fn predicted(drawn: &Drawn, all: &[Strategy], machine: &Machine) -> Result<Vec<(Strategy, f64)>> {
    let each = all.iter().map(|strategy| {
        let seconds = compared::predict(drawn, *strategy, machine)?;
        Ok((*strategy, seconds))
    });
    each.collect()
}

/// A layer that chooses by itself, then finals.
fn choose(
    rank: &mut Rank,
    drawn: &Drawn,
    layer: Layer,
    (measured, machine): (Vec<(Strategy, f64)>, &Machine),
) -> Result {
    let own = rank.world.rank();
    let (input, dy) = (drawn.input(own), drawn.output_gradient(own));
    let mut layer = adaptive(rank, drawn, (layer, machine), (&input, &dy))?;
    let all: Vec<Strategy> = measured.iter().map(|(strategy, _)| *strategy).collect();
    let others = [layer.strategy(), planned(drawn, &all, machine)?];
    let finalists = finalists(measured, others);
    let finals = (&finalists[..], FINALS, "final");
    in_turns(rank, drawn, &mut layer, finals, (&input, &dy)).map(drop)
}

/// Number of the fastest strategies that are measured again;
const FASTEST: usize = 6;
/// number of those measurements.
const FINALS: usize = 16;

/// Returns the fastest measured strategies and some others. The least of many
/// noisy times belongs to a lucky one, so the time of the fastest is what it
/// takes when it is measured again.
fn finalists(mut measured: Vec<(Strategy, f64)>, others: [Strategy; 2]) -> Vec<Strategy> {
    measured.sort_by(|a, b| a.1.total_cmp(&b.1));
    let fastest = measured.into_iter().map(|(strategy, _)| strategy);
    let mut list: Vec<Strategy> = fastest.take(FASTEST).collect();
    for other in others {
        if !list.contains(&other) {
            list.push(other);
        }
    }
    list
}

/// Returns the strategy that the planner would take.
fn planned(drawn: &Drawn, all: &[Strategy], machine: &Machine) -> Result<Strategy> {
    let each = predicted(drawn, all, machine)?;
    Ok(Strategy::simplest(each.into_iter()).unwrap_or_default())
}

/// So many steps by each strategy, and one before them, in turns: a line for each by this name,
/// and the lower quartile of a step of the slowest rank.
fn in_turns(
    rank: &mut Rank,
    drawn: &Drawn,
    layer: &mut Layer,
    (all, rounds, name): (&[Strategy], usize, &str),
    (input, dy): (&Input<'_>, &Tensor<'_>),
) -> Result<Vec<(Strategy, f64)>> {
    let mut times: Vec<Vec<Passes>> = vec![Vec::new(); all.len()];
    for round in 0..=rounds {
        for turn in 0..all.len() {
            // Whoever comes first finds other queues than those after.
            let kind = (round + turn) % all.len();
            layer.set_strategy(all[kind])?;
            rank.meet()?;
            let passes = step(layer, input, dy)?;
            if round > 0 {
                times[kind].push(passes); // the first one compiles and makes room
            }
        }
    }
    let mut measured = Vec::new();
    for (strategy, own) in all.iter().zip(&times) {
        let slowest = rank.slowest(own)?;
        let text = strategy.to_string();
        let line = json!({ "layer": drawn.number, name: text, "rounds": slowest });
        rank.say(&line.to_string());
        measured.push((*strategy, compared::step(&slowest)));
    }
    Ok(measured)
}

pub fn step(layer: &Layer, input: &Input<'_>, dy: &Tensor<'_>) -> Result<Passes> {
    let start = Instant::now();
    let (_, saved) = layer.forward_train(input.reading(&["y"]), RngKey::default())?;
    let forward = start.elapsed().as_secs_f64();
    layer.backward(&saved, dy, false)?;
    Ok([forward, start.elapsed().as_secs_f64() - forward])
}

/// The layer chooses by itself, by predictions and then by measurement; the layer that has
/// chosen.
fn adaptive(
    rank: &mut Rank,
    drawn: &Drawn,
    (mut layer, machine): (Layer, &Machine),
    (input, dy): (&Input<'_>, &Tensor<'_>),
) -> Result<Layer> {
    let planned = Planned {
        comm_dtypes: vec![drawn.comm_dtype],
        ..Planned::of(machine.clone())
    };
    let predict = planned.predict(&layer)?;
    layer.set_strategy(Strategy::default())?;
    let space = StrategySpace::of(drawn.mesh, 4);
    let tuner = Tuner::new(TunerOptions::default(), space);
    let tuner = LayerTuner::new(tuner, crate::MACHINE, predict);
    layer.set_tuner(Some(tuner.clone()))?;
    let kept = || {
        let events = tuner.events();
        events
            .iter()
            .any(|event| matches!(event.what, What::Kept { .. }))
    };
    let mut tried = 0;
    while !kept() {
        rank.meet()?;
        let (_, saved) = layer.forward_train(input, RngKey::default())?;
        layer.backward(&saved, dy, false)?;
        tried += 1;
    }
    layer.set_tuner(None)?;
    let strategy = layer.strategy().to_string();
    let line = json!({ "layer": drawn.number, "adaptive": strategy, "steps": tried });
    rank.say(&line.to_string());
    Ok(layer)
}
