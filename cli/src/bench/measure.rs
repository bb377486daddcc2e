//! Timing.

use super::lead::busiest;
use crate::failure::Result;
use crate::timing::{TimedCall, median, middle, spread};
use moesaic::Layer;
use moesaic::plan::{Step, Work};
use std::time::{Duration, Instant};

/// The times at one token count.
pub struct Run {
    pub tokens: usize,
    /// The number of repetitions.
    pub repeats: usize,
    /// The time of a call from host memory to host memory, forward and backward in training.
    pub call: Duration,
    /// The times of the launches.
    pub launches: Vec<LaunchTime>,
    /// The spread of the times of all launches together.
    pub spread: f64,
    /// The comparison with uniform routing, if the routing is skewed.
    pub against: Option<AgainstUniform>,
}

/// The time of one launch.
pub struct LaunchTime {
    /// The symbol, or the kernel's name where several kernels have the symbol.
    pub label: String,
    /// The index into the plan's kernels.
    pub kernel: usize,
    /// The least arithmetic and traffic.
    pub work: Work,
    /// The median time.
    pub time: Duration,
    /// The spread of its times.
    pub spread: f64,
}

impl Run {
    /// Returns the time of all launches together.
    pub fn time(&self) -> Duration {
        self.launches.iter().map(|launch| launch.time).sum()
    }
}

/// The comparison of a run with skewed routing to one with uniform routing.
pub struct AgainstUniform {
    /// The time of all launches on tokens that are spread over all experts alike.
    pub uniform: Duration,
    /// The median, over pairs, of the uniform time over the run's own time: 1 if skew costs
    /// nothing.
    pub ratio: f64,
    /// The rows of the busiest expert over the mean, in the run and in the uniform run.
    pub busiest: [f64; 2],
}

/// The calls that are timed.
pub struct TimedCalls {
    pub own: TimedCall,
    /// The call with uniform routing, timed in turns with the run's own.
    pub uniform: Option<TimedCall>,
}

const LEAST: usize = 3;
const MOST: usize = 1000;

/// Warms up, then repeats for about `budget`. Every time is a median.
pub fn measure(layer: &Layer, calls: &TimedCalls, budget: Duration) -> Result<Run> {
    let tokens = calls.own.input.tokens;
    calls.own.run(layer)?;
    let launches = layer.time_steps(tokens)?.len();
    let (mut whole, mut sums, mut steps) = (Vec::new(), Vec::new(), vec![Vec::new(); launches]);
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
        sums.push(own);
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
    let steps = steps.into_iter().enumerate();
    Ok(Run {
        tokens,
        repeats: whole.len(),
        call: median(whole),
        launches: steps
            .map(|(i, times)| launch(layer, i, tokens, times))
            .collect(),
        spread: spread(&sums),
        against,
    })
}

fn launch(layer: &Layer, i: usize, tokens: usize, times: Vec<Duration>) -> LaunchTime {
    let plan = layer.tilings().at(tokens);
    let step = plan.all_steps().nth(i).expect("one time per step");
    let Step::Launch(launched) = step;
    LaunchTime {
        label: plan.label(step).to_string(),
        kernel: launched.entry.kernel,
        work: Work::of(plan, step, tokens as u64),
        spread: spread(&times),
        time: median(times),
    }
}
