//! Timing.

use super::lead::busiest;
use crate::failure::Result;
use crate::timing::{Call, median, middle};
use moesaic::Layer;
use moesaic::plan::{Step, Work};
use std::time::{Duration, Instant};

/// One token count, timed.
pub struct Run {
    pub tokens: usize,
    /// How often it ran.
    pub repeats: usize,
    /// A call from host memory to host memory, forward and backward in training.
    pub call: Duration,
    /// Each launch.
    pub launches: Vec<Launch>,
    /// Beside uniform routing, where it is skewed.
    pub against: Option<AgainstUniform>,
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

/// How a run with skewed routing stands to one with uniform routing.
pub struct AgainstUniform {
    /// All launches on tokens that are led to all experts alike.
    pub uniform: Duration,
    /// Time on those over time on the run's own, the median over pairs: 1 where
    /// skew costs nothing.
    pub ratio: f64,
    /// Rows of the busiest expert over the mean: the run's, and the uniform.
    pub busiest: [f64; 2],
}

/// The calls that are timed.
pub struct Calls {
    pub own: Call,
    /// Timed beside it.
    pub uniform: Option<Call>,
}

const LEAST: usize = 3;
const MOST: usize = 1000;

/// Warms up, then repeats for about `budget`; every time is a median.
pub fn measure(layer: &Layer, calls: &Calls, budget: Duration) -> Result<Run> {
    let tokens = calls.own.input.tokens;
    calls.own.run(layer)?;
    let launches = layer.time_steps(tokens)?.len();
    let (mut whole, mut steps) = (Vec::new(), vec![Vec::new(); launches]);
    let (mut uniform, mut ratios) = (Vec::new(), Vec::new());
    let begun = Instant::now();
    while whole.len() < LEAST || (whole.len() < MOST && begun.elapsed() < budget) {
        if let Some(call) = &calls.uniform {
            call.run(layer)?;
            uniform.push(layer.time_steps(tokens)?.iter().map(|step| step.time).sum());
        }
        let started = Instant::now();
        calls.own.run(layer)?;
        whole.push(started.elapsed());
        let times = layer.time_steps(tokens)?;
        let own: Duration = times.iter().map(|step| step.time).sum();
        let beside = |uniform: &Duration| uniform.as_secs_f64() / own.as_secs_f64().max(1e-9);
        ratios.extend(uniform.last().map(beside));
        let all = steps.iter_mut().zip(times);
        all.for_each(|(all, step)| all.push(step.time));
    }
    let against = match &calls.uniform {
        Some(call) => Some(AgainstUniform {
            uniform: median(uniform),
            ratio: middle(ratios),
            busiest: [
                busiest(layer, &calls.own.input)?,
                busiest(layer, &call.input)?,
            ],
        }),
        None => None,
    };
    let times = steps.into_iter().map(median).enumerate();
    Ok(Run {
        tokens,
        repeats: whole.len(),
        call: median(whole),
        launches: times
            .map(|(i, time)| launch(layer, i, tokens, time))
            .collect(),
        against,
    })
}

fn launch(layer: &Layer, i: usize, tokens: usize, time: Duration) -> Launch {
    let plan = layer.tilings().at(tokens);
    let step = plan.all_steps().nth(i).expect("one time per step");
    let Step::Launch(launched) = step;
    Launch {
        label: plan.label(step).to_string(),
        kernel: launched.entry.kernel,
        work: Work::of(plan, step, tokens as u64),
        time,
    }
}
