//! A character-level Transformer with Mixture-of-Experts layers against its
//! dense twin of equal compute, on the text of Moby-Dick.
//!
//! The recipe is FastMoE's for Transformer-XL on enwik8, scaled to two CPU
//! cores: every feed-forward layer is 64 ReLU experts, two of which work on a
//! token. The twin's feed-forward layer is as wide as two experts, so both
//! models do the same arithmetic per token. Both start from the same attention
//! weights and see the same batches.
//!
//! ```sh
//! cargo run --release --features train --example char_lm -- --plot curves.svg
//! ```
//!
//! On many ranks the model with experts trains alone, with the same losses as on one rank: on
//! threads (`--ranks 4`, `--mesh ep=2,dp=2`), or on processes.
//!
//! ```sh
//! cargo build --release --example char_lm
//! mpirun -n 4 target/release/examples/char_lm --save model.safetensors --every 50
//! target/release/examples/char_lm --ranks 2 --resume model.safetensors
//! ```

#[path = "../common/mod.rs"]
mod common;

mod attention;
mod dense;
mod job;
mod model;
mod ranks;
mod run;
mod text;

use attention::Shape;
use common::chart::{self, COLOURS, Series};
use common::experts::{Experts, spec};
use dense::Dense;
use job::Job;
use model::Model;
use moesaic::Engine;
use moesaic::reference::Random;
use run::{Learner, Pace, Point};
use std::error::Error;
use std::path::PathBuf;
use text::Text;

/// The shape of both models except their feed-forward layers.
const SHAPE: Shape = Shape {
    context: 128,
    width: 128,
    heads: 4,
};
const LAYERS: usize = 3;
const EXPERTS: usize = 64;
const TOP_K: usize = 2;
/// Inner width of an expert.
const HIDDEN: usize = 256;

struct Options {
    pace: Pace,
    plot: Option<PathBuf>,
    job: Job,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse(std::env::args().skip(1))?;
    let text = Text::book();
    if options.job.wanted()? {
        return options.job.run(&text, &options.pace);
    }
    let mut dense = Learner::new(dense_model(&text), &options.pace);
    let mut experts = Learner::new(expert_model(&text)?, &options.pace);
    println!(
        "{} characters to learn from, {} held out, {} different ones",
        text.train.len(),
        text.held_out.len(),
        text.vocabulary
    );
    println!(
        "dense: {} parameters; {EXPERTS} experts, {TOP_K} per token: {} parameters",
        dense.parameters(),
        experts.parameters()
    );
    println!("loss in nats per character\n");
    println!("          training          held out        seconds so far");
    println!("  step   dense  experts   dense  experts   dense  experts");
    let (mut left, mut right) = (Vec::new(), Vec::new());
    for step in 1..=options.pace.steps {
        let batch = text.batch(options.pace.sequences, SHAPE.context, &mut batches(step));
        dense.step(&batch)?;
        experts.step(&batch)?;
        if step % options.pace.report == 0 {
            let held_out = text.held_out(options.pace.held_out, SHAPE.context);
            left.push(dense.report(&held_out)?);
            right.push(experts.report(&held_out)?);
            print_row(left[left.len() - 1], right[right.len() - 1]);
        }
    }
    if let Some(path) = &options.plot {
        std::fs::write(path, plot(&left, &right))?;
        println!("\nthe curves are in {}", path.display());
    }
    conclude(&options.pace, &left, &right)
}

/// Returns the random numbers of a step's batch, which depend on the step alone.
fn batches(step: usize) -> Random {
    Random::new(1_000_000 + step as u64)
}

/// Returns the gain of the last map of a residual branch, which starts smaller in a deeper model.
fn last_gain() -> f64 {
    1.0 / (2.0 * LAYERS as f64).sqrt()
}

fn dense_model(text: &Text) -> Model<Dense> {
    let mut random = Random::new(3);
    let hidden = TOP_K * HIDDEN;
    let layers = (0..LAYERS).map(|_| Dense::new(SHAPE.width, hidden, last_gain(), &mut random));
    Model::new(text.vocabulary, SHAPE, layers.collect(), 1)
}

fn expert_model(text: &Text) -> Result<Model<Experts>, Box<dyn Error>> {
    let engine = Engine::cpu()?;
    let mut random = Random::new(3);
    let spec = spec(SHAPE.width, HIDDEN, EXPERTS, TOP_K);
    let layers: Result<Vec<Experts>, _> = (0..LAYERS)
        .map(|_| Experts::new(&engine, &spec, last_gain(), &mut random))
        .collect();
    Ok(Model::new(text.vocabulary, SHAPE, layers?, 1))
}

fn print_row(dense: Point, experts: Point) {
    println!(
        "{:6} {:7.4}  {:7.4} {:7.4}  {:7.4} {:7.1}  {:7.1}",
        dense.step,
        dense.training,
        experts.training,
        dense.held_out,
        experts.held_out,
        dense.seconds,
        experts.seconds
    );
}

fn plot(dense: &[Point], experts: &[Point]) -> String {
    let line = |points: &[Point]| points.iter().map(|p| (p.step as f64, p.held_out)).collect();
    let series = [
        Series {
            name: "dense",
            colour: COLOURS[0],
            points: line(dense),
        },
        Series {
            name: "64 experts of 2",
            colour: COLOURS[1],
            points: line(experts),
        },
    ];
    let title = "Character-level Transformer on Moby-Dick, equal compute per token";
    chart::svg(
        title,
        ["step", "held-out loss, nats per character"],
        &series,
    )
}

/// Fails if the experts did not end with the lower loss, the claim of this example.
fn conclude(pace: &Pace, dense: &[Point], experts: &[Point]) -> Result<(), Box<dyn Error>> {
    let (Some(dense), Some(experts)) = (dense.last(), experts.last()) else {
        return Ok(());
    };
    println!(
        "\nheld out: dense {:.4}, experts {:.4} nats per character",
        dense.held_out, experts.held_out
    );
    if pace.judged && experts.held_out >= dense.held_out {
        return Err("the experts did not end lower than their dense twin".into());
    }
    Ok(())
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Options, Box<dyn Error>> {
        let (mut pace, mut plot, mut job) = (Pace::full(), None, Job::default());
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} needs a value"));
            match &*arg {
                "--quick" => pace = Pace::quick(),
                "--steps" => pace = pace.with_steps(value()?.parse()?),
                "--plot" => plot = Some(value()?.into()),
                "--ranks" => job.ranks = Some(value()?.parse()?),
                "--mesh" => job.mesh = Some(job::mesh(&value()?)?),
                "--save" => job.save = Some(value()?.into()),
                "--every" => job.every = Some(value()?.parse()?),
                "--resume" => job.resume = Some(value()?.into()),
                "--until" => job.until = Some(value()?.parse()?),
                _ => return Err(format!("`{arg}`: not one of {ARGUMENTS}").into()),
            }
        }
        Ok(Options { pace, plot, job })
    }
}

const ARGUMENTS: &str = "--steps N, --quick, --plot F; on many ranks --ranks N, --mesh ep=N,dp=N, \
                         --save F, --every N, --resume F, --until N";
