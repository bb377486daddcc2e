//! What the host does for a call of a layer on a device, with and without a captured graph.

use crate::commands::Place;
use crate::data::{Call, noise_call, weights};
use crate::pass::Pass;
use crate::timing::{Clocked, Made};
use crate::{Result, specs::SPECS};
use clap::Args;
use moesaic::{DType, Engine, LayerSpec, Tensors};
use std::process::ExitCode;

/// What is measured.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    place: Place,
    /// Few tokens.
    #[arg(long)]
    tiny: bool,
}

/// Calls that are queued without waiting; few enough that the queue is never full.
const CALLS: usize = 20;

/// Samples of each number; the least is reported, since other work only adds.
const SAMPLES: usize = 40;

/// The layers, by name.
pub fn specs() -> Vec<(&'static str, LayerSpec)> {
    let read = |(name, text)| (name, LayerSpec::from_toml(text).expect("a valid spec"));
    SPECS.into_iter().map(read).collect()
}

/// A table: 0 when every line is there, 1 when one is not.
///
/// # Errors
/// When there is no device.
pub fn run(options: &Options) -> Result<ExitCode> {
    let engine = options.place.open()?;
    println!("# {}", options.place.describe()?);
    let tokens: &[usize] = if options.tiny {
        &[1, 8]
    } else {
        &[1, 64, 4096]
    };
    if options.place.simulates() {
        println!("# a simulator: launches of a call are counted, times mean nothing")
    } else {
        println!(
            "# microseconds of a call, the least of {SAMPLES} samples of {CALLS} calls: the host's \
             to queue it,\n# the host's until it is done, the device's; then the same as a graph"
        )
    }
    println!(
        "tokens  pass     launches   queued     done   device  | graph: queued     done   device"
    );
    let mut failed = false;
    for (name, spec) in specs() {
        println!("# {name}");
        let tensors = weights(&spec, DType::Bf16);
        for &tokens in tokens {
            for pass in [Pass::Forward, Pass::Both] {
                let line = line(options, &engine, &spec, &tensors, tokens, pass);
                if let Err(error) = line {
                    failed = true;
                    println!("{tokens:6}  {pass:<8} FAIL {error}");
                }
            }
        }
    }
    Ok(ExitCode::from(u8::from(failed)))
}

fn line(
    options: &Options,
    engine: &Engine,
    spec: &LayerSpec,
    weights: &Tensors<'_>,
    tokens: usize,
    pass: Pass,
) -> Result {
    let made = Made::new(engine, spec, weights, pass)?;
    let call: Call = noise_call(spec.shape.model_dim, DType::Bf16, tokens);
    let placed = made.place(&call)?;
    placed.once()?;
    placed.wait()?;
    let launches = made.launches(tokens);
    let head = format!("{tokens:6}  {pass:<8} {launches:8}");
    if options.place.simulates() {
        println!("{head}");
        return Ok(());
    }
    let plain = least(|| placed.time(CALLS))?;
    let graph = placed.capture()?;
    let graph = least(|| placed.time_graph(&*graph, CALLS))?;
    println!("{head} {}  |        {}", columns(plain), columns(graph));
    Ok(())
}

fn columns(clocked: Clocked) -> String {
    let Clocked {
        device,
        wall,
        queued,
    } = clocked;
    let [queued, wall, device] = [queued, wall, device].map(|ms| ms * 1e3);
    format!("{queued:8.2} {wall:8.2} {device:8.2}")
}

/// The least of each number.
fn least(sample: impl Fn() -> Result<Clocked>) -> Result<Clocked> {
    let mut best = sample()?;
    for _ in 1..SAMPLES {
        let next = sample()?;
        best = Clocked {
            device: best.device.min(next.device),
            wall: best.wall.min(next.wall),
            queued: best.queued.min(next.queued),
        };
    }
    Ok(best)
}
