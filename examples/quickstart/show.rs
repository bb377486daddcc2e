//! The output of the quickstart.

use moesaic::trace::StepTime;
use moesaic::{Engine, EngineError, LayerSpec};
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
pub fn built(engine: &Engine, time: Duration) -> String {
    let stats = engine.stats();
    format!(
        "{} kernels in {:.1} ms: {} compiled, {} from the cache",
        stats.compiled + stats.from_store,
        ms(time),
        stats.compiled,
        stats.from_store,
    )
}

/// Lists the time of each stage.
pub fn timing(tokens: usize, times: &[StepTime]) -> String {
    let mut text = format!("  T = {tokens:<5} {:<22} {:>9}\n", "", "ms");
    for step in times {
        text += &row(&step.symbol, step.time);
    }
    text + &row("the whole layer", times.iter().map(|step| step.time).sum())
}

fn row(name: &str, time: Duration) -> String {
    format!("            {name:<22} {:>9.3}\n", ms(time))
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
