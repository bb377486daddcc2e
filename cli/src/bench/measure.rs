//! Timing.

use crate::failure::Result;
use crate::random;
use moesaic::Layer;
use moesaic::plan::Work;
use std::time::{Duration, Instant};

/// One token count, timed.
pub struct Run {
    pub tokens: usize,
    /// How often it ran.
    pub repeats: usize,
    /// A call from host memory to host memory.
    pub call: Duration,
    /// Each launch.
    pub launches: Vec<Launch>,
}

/// One launch, timed.
pub struct Launch {
    /// The symbol, or the kernel's name where several kernels have the symbol.
    pub label: String,
    /// Index into the plan's kernels.
    pub kernel: usize,
    /// Least arithmetic and traffic.
    pub work: Work,
    /// The median.
    pub time: Duration,
}

impl Run {
    /// All launches together.
    pub fn time(&self) -> Duration {
        self.launches.iter().map(|launch| launch.time).sum()
    }
}

const LEAST: usize = 3;
const MOST: usize = 1000;

/// Warms up, then repeats for about `budget`; every time is a median.
pub fn measure(layer: &Layer, tokens: usize, budget: Duration) -> Result<Run> {
    let input = random::input(layer.spec(), tokens);
    layer.forward(&input)?;
    let launches = layer.time_steps(tokens)?.len();
    let (mut calls, mut steps) = (Vec::new(), vec![Vec::new(); launches]);
    let begun = Instant::now();
    while calls.len() < LEAST || (calls.len() < MOST && begun.elapsed() < budget) {
        let started = Instant::now();
        layer.forward(&input)?;
        calls.push(started.elapsed());
        let times = layer.time_steps(tokens)?;
        steps
            .iter_mut()
            .zip(times)
            .for_each(|(all, step)| all.push(step.time));
    }
    let times = steps.into_iter().map(median);
    let launches = times
        .enumerate()
        .map(|(i, time)| launch(layer, i, tokens, time))
        .collect();
    Ok(Run {
        tokens,
        repeats: calls.len(),
        call: median(calls),
        launches,
    })
}

fn launch(layer: &Layer, i: usize, tokens: usize, time: Duration) -> Launch {
    let plan = layer.plan();
    let step = plan.all_steps().nth(i).expect("one time per step");
    let same = plan.all_steps().filter(|other| other.symbol == step.symbol);
    let label = match same.count() {
        1 => step.symbol.clone(),
        _ => plan.kernels[step.kernel].name.clone(),
    };
    Launch {
        label,
        kernel: step.kernel,
        work: Work::of(plan, step, tokens as u64),
        time,
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
