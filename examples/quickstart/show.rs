//! The output of the quickstart.

use moesaic::cpu::limits::Limits;
use moesaic::engine::StepTime;
use moesaic::plan::{LayerPlan, Role, Work};
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
        .is_some_and(|t| matches!(t.role, Role::Output | Role::Scratch));
    filled
        && !plan.steps[..i]
            .iter()
            .any(|step| plan.names(step).any(|other| other == name))
}

/// Describes the limits of this machine, which rooflines follow from.
pub fn limits(spec: &LayerSpec, limits: &Limits) -> String {
    format!(
        "\nlimits of this machine: {:.0} GFLOP/s f32, {:.1} GB/s read from memory ({} threads)\n\
         (what fits in a cache is read faster, so that small steps can do better than that)\n\
         layer `{}` at {} x {} x {}, f32:\n",
        limits.f32_gflops,
        limits.read_gbps,
        limits.threads,
        spec.name,
        spec.shape.model_dim,
        spec.shape.hidden_dim,
        spec.shape.experts,
    )
}

/// Returns the time of each stage beside its roofline, the shortest time the machine allows.
pub fn timing(layer: &Layer, tokens: usize, times: &[StepTime], limits: &Limits) -> String {
    let plan = layer.plan();
    let mut text = format!(
        "  T = {tokens:<5} {:<22} {:>9} {:>11} {:>13}
",
        "", "ms", "roofline ms", "% of roofline"
    );
    let (mut sum, mut rooflines) = (0.0, 0.0);
    for (step, timed) in plan.steps.iter().zip(times) {
        let work = Work::of(plan, step, tokens as u64);
        let floor = work
            .floor(limits.f32_gflops * 1e9, limits.read_gbps * 1e9)
            .seconds
            * 1e3;
        text += &row(&timed.symbol, ms(timed.time), floor);
        sum += ms(timed.time);
        rooflines += floor;
    }
    text + &row("the whole layer", sum, rooflines)
}

fn row(name: &str, time: f64, roofline: f64) -> String {
    let share = 100.0 * roofline / time;
    format!("            {name:<22} {time:>9.3} {roofline:>11.3} {share:>13.0}\n")
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
