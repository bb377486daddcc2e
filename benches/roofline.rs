//! A layer that fills a machine, stage by stage beside its roofline: the shortest time that the
//! arithmetic and the memory of this machine allow.
//!
//! ```sh
//! cargo bench -p moesaic-benches --bench roofline
//! ```

use moesaic::cpu::limits::{self, Limits};
use moesaic::cpu::{CpuCompiler, CpuDevice, host_isa};
use moesaic::plan::{MemoryLevel, Roofs, Work};
use moesaic::reference::Random;
use moesaic::trace::StepTime;
use moesaic::{Engine, EngineError, Init, Input, Layer, LayerSpec};
use std::error::Error;
use std::time::Duration;

fn main() -> Result<(), Box<dyn Error>> {
    let engine = Engine::cpu()?;
    println!(
        "{} · {} threads · {}",
        engine.device_info().name,
        engine.device_info().units,
        engine.target()
    );
    let spec = LayerSpec::from_toml(
        r#"
        name = "full-size"
        shape = { model_dim = 1024, hidden_dim = 512, experts = 16, top_k = 4 }
        router = { score = "sigmoid", select_bias = true, renormalize = "sum", scale = 2.5 }
        "#,
    )?;
    let layer = engine.layer(&spec, &Init::Linear.weights(&spec, 7))?;
    let measure = || {
        let compiler = CpuCompiler::find(None)?;
        Ok::<_, Box<dyn Error>>(limits::measure(&compiler, &CpuDevice::new(), host_isa())?)
    };
    let before = measure()?;
    let mut runs = Vec::new();
    for tokens in [1, 64, 2048] {
        let x: Vec<f32> = Random::new(2)
            .vec(tokens * spec.shape.model_dim)
            .into_iter()
            .map(|v| v as f32)
            .collect();
        let input = Input::new(tokens, &x);
        let times = best_of(7, || {
            layer.forward(&input)?;
            layer.time_steps(tokens)
        })?;
        runs.push((tokens, times));
    }
    // The machine may have been busy: a limit that moved makes the shares below uncertain.
    let limits = Watched::new(&before, &measure()?);
    println!("{}", describe(&spec, &limits, before.threads));
    for (tokens, times) in runs {
        println!("{}", timing(&layer, tokens, &times, &limits));
    }
    Ok(())
}

/// The limits of this machine, measured before and after the layer was timed.
struct Watched {
    flops_per_second: f64,
    levels: Vec<MemoryLevel>,
    /// The largest part by which a limit moved.
    moved: f64,
}

impl Watched {
    /// Takes the better of both measurements.
    fn new(before: &Limits, after: &Limits) -> Watched {
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
fn describe(spec: &LayerSpec, limits: &Watched, threads: usize) -> String {
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
fn timing(layer: &Layer, tokens: usize, times: &[StepTime], limits: &Watched) -> String {
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
fn best_of(
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

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
