//! The output of the quickstart.

use moesaic::cpu::limits::Limits;
use moesaic::engine::StepTime;
use moesaic::plan::{LayerPlan, MemoryLevel, Roofs, TensorRole, Work};
use moesaic::{Engine, EngineError, Layer, LayerSpec};
use std::time::Duration;

/// Describes the layer in one line.
pub fn spec(spec: &LayerSpec) -> String {
    let shape = &spec.shape;
    format!(
        "layer `{}`: {} experts, {} per token, {} -> {} -> {}, {} weights, {} shared",
        spec.name,
        shape.experts,
        shape.top_k,
        shape.model_dim,
        shape.hidden_dim,
        spec.output_dim(),
        spec.precision.weights,
        spec.shared.len(),
    )
}

/// Describes the origin of the kernels.
pub fn built(engine: &Engine, layer: &Layer, time: Duration) -> String {
    let stats = engine.stats();
    format!(
        "{} kernels in {:.1} ms: {} compiled, {} from the cache",
        layer.plan().kernels.len(),
        ms(time),
        stats.compiled,
        stats.from_store,
    )
}

/// Lists the launches in order, with the tensors that each writes.
pub fn plan(plan: &LayerPlan) -> String {
    let mut text = String::from("\nplan\n");
    for (i, step) in plan.steps.iter().enumerate() {
        let made = plan.names(step).filter(|name| made_by(plan, i, name));
        let made: Vec<&str> = made.collect();
        text += &format!(
            "  {:>2} {:<22} -> {}\n",
            i + 1,
            plan.symbol(step),
            made.join(", ")
        );
    }
    text
}

/// Returns true if step `i` is the first to name a tensor that the layer fills.
fn made_by(plan: &LayerPlan, i: usize, name: &str) -> bool {
    let filled = plan
        .tensor(name)
        .is_some_and(|t| matches!(t.role, TensorRole::Output | TensorRole::Scratch));
    filled
        && !plan.steps[..i]
            .iter()
            .any(|step| plan.names(step).any(|other| other == name))
}

/// The limits of this machine, measured before and after the layer was timed.
pub struct Watched {
    flops_per_second: f64,
    levels: Vec<MemoryLevel>,
    /// The largest part by which a limit moved.
    moved: f64,
}

impl Watched {
    /// Takes the better of both measurements.
    pub fn new(before: &Limits, after: &Limits) -> Watched {
        let mut moved = 0f64;
        let mut better = |before: f64, after: f64| {
            moved = moved.max(before.max(after) / before.min(after) - 1.0);
            before.max(after)
        };
        let flops_per_second = better(before.f32_gflops, after.f32_gflops) * 1e9;
        let memory = better(before.read_gbps, after.read_gbps);
        let caches = before.caches.iter().zip(&after.caches);
        let caches = caches.map(|(before, after)| {
            let rate = better(before.read_gbps, after.read_gbps);
            (before.level, before.bytes, rate)
        });
        let levels = MemoryLevel::measured(caches, memory);
        Watched {
            flops_per_second,
            levels,
            moved,
        }
    }

    fn roofs(&self) -> Roofs<'_> {
        Roofs {
            flops_per_second: self.flops_per_second,
            levels: &self.levels,
            launch_seconds: 0.0,
        }
    }
}

/// Describes the limits of this machine, which rooflines follow from.
pub fn limits(spec: &LayerSpec, limits: &Watched, threads: usize) -> String {
    let rate = |level: &MemoryLevel| {
        let rate = level.bytes_per_second.unwrap_or(0.0) / 1e9;
        format!("{rate:.1} GB/s from {}", level.name)
    };
    let rates: Vec<String> = limits.levels.iter().rev().map(rate).collect();
    let steady = match limits.moved {
        moved if moved > 0.1 => format!(
            "machine was not steady: a limit moved by {:.0} % during the run\n",
            100.0 * moved
        ),
        _ => String::new(),
    };
    format!(
        "\nlimits of this machine: {:.0} GFLOP/s f32, {} ({threads} threads)\n\
         {steady}layer `{}` at {} x {} x {}, f32:\n",
        limits.flops_per_second / 1e9,
        rates.join(", "),
        spec.name,
        spec.shape.model_dim,
        spec.shape.hidden_dim,
        spec.shape.experts,
    )
}

/// Returns the time of each stage beside its roofline, the shortest time the machine allows.
pub fn timing(layer: &Layer, tokens: usize, times: &[StepTime], limits: &Watched) -> String {
    let plan = layer.plan();
    let mut text = format!(
        "  T = {tokens:<5} {:<22} {:>9} {:>11} {:>13}
",
        "", "ms", "roofline ms", "% of roofline"
    );
    let (mut sum, mut rooflines) = (0.0, 0.0);
    for (step, timed) in plan.steps.iter().zip(times) {
        let work = Work::of(plan, step, tokens as u64);
        let floor = work.floor(&limits.roofs()).seconds * 1e3;
        text += &row(&timed.symbol, ms(timed.time), floor);
        sum += ms(timed.time);
        rooflines += floor;
    }
    text + &row("the whole layer", sum, rooflines)
}

/// Formats a line; a time below its roofline has no share of it.
fn row(name: &str, time: f64, roofline: f64) -> String {
    let share = match 100.0 * roofline / time {
        share if share > 100.5 => "in cache".to_string(),
        share => format!("{:.0}", share.min(100.0)),
    };
    format!("            {name:<22} {time:>9.3} {roofline:>11.3} {share:>13}\n")
}

/// Returns the run with the least total time.
pub fn best_of(
    runs: usize,
    mut run: impl FnMut() -> Result<Vec<StepTime>, EngineError>,
) -> Result<Vec<StepTime>, EngineError> {
    let total = |times: &Vec<StepTime>| times.iter().map(|t| t.time).sum::<Duration>();
    let mut best = run()?;
    for _ in 1..runs {
        let next = run()?;
        if total(&next) < total(&best) {
            best = next;
        }
    }
    Ok(best)
}

/// Returns the largest difference, relative to the largest expected value.
pub fn error(found: &[f32], expected: &[f64]) -> f64 {
    let scale = expected.iter().fold(0f64, |most, v| most.max(v.abs()));
    let pairs = found.iter().zip(expected);
    pairs.fold(0f64, |most, (f, e)| most.max((f64::from(*f) - e).abs())) / scale
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
