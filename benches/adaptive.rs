//! Measures every strategy of layers over ranks, and compares it with the
//! predictions of the planner.
//!
//! ```sh
//! benches/nodes/planned.sh          # all of it, on emulated nodes: docs/SCALE.md
//! cargo bench -p moesaic-benches --bench adaptive -- compare measured.txt calibration.toml
//! ```
//!
//! - `measure FIRST LAST ROUNDS [CALIBRATION]` runs under MPI. It draws layers
//!   by number, measures each strategy in turns, and prints a line of JSON for
//!   each. With a calibration it also measures a layer that chooses by itself,
//!   and finals: the fastest, the planner's and the layer's choice once more, in
//!   turns.
//! - `again MEASURED CALIBRATION` repeats the latter for existing lines.
//! - `hot ROUNDS [CALIBRATION]` runs under MPI: a hot expert with and without
//!   shadows and replicas, with the planner's predictions.
//! - `compare MEASURED CALIBRATION` reads those lines and predicts each.
//! - `phases NUMBER STRATEGY CALIBRATION` runs under MPI: the time of each part
//!   of a drawn layer's step.

#[path = "adaptive/compared.rs"]
mod compared;
#[path = "layer/data.rs"]
#[allow(dead_code, reason = "the bench of layers uses the rest")]
mod data;
#[path = "adaptive/drawn.rs"]
mod drawn;
#[path = "adaptive/hot.rs"]
mod hot;
#[path = "adaptive/measured.rs"]
mod measured;
#[path = "adaptive/phases.rs"]
mod phases;
#[path = "layer/shapes.rs"]
#[allow(dead_code, reason = "the bench of layers uses the rest")]
mod shapes;

use moesaic::planner::{Calibration, Machine, published};
use std::error::Error;
use std::fs;

type Result<T = ()> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Name of the machine that emulated nodes form.
const MACHINE: &str = "mpi-emulated";

const USAGE: &str = "measure FIRST LAST ROUNDS [CALIBRATION] | \
                     again MEASURED CALIBRATION | hot ROUNDS [CALIBRATION] | \
                     compare MEASURED CALIBRATION | phases NUMBER STRATEGY CALIBRATION";

fn main() -> Result {
    let args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    let args: Vec<String> = args.collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words[..] {
        ["measure", first, last, rounds] => {
            measured::run(first.parse()?..=last.parse()?, rounds.parse()?, None)
        }
        ["measure", first, last, rounds, calibration] => {
            let machine = Some(machine(calibration)?);
            measured::run(first.parse()?..=last.parse()?, rounds.parse()?, machine)
        }
        ["again", lines, calibration] => {
            measured::again(&fs::read_to_string(lines)?, &machine(calibration)?)
        }
        ["hot", rounds] => hot::run(rounds.parse()?, None),
        ["hot", rounds, calibration] => hot::run(rounds.parse()?, Some(&machine(calibration)?)),
        ["compare", lines, calibration] => {
            compared::run(&fs::read_to_string(lines)?, &machine(calibration)?)
        }
        ["phases", number, strategy, calibration] => {
            let machine = machine(calibration)?;
            phases::run(number.parse()?, strategy.parse()?, &machine)
        }
        // Without words, as `cargo bench` runs it: what would be measured.
        [] => {
            (1..=22).for_each(|number| println!("{}", drawn::Drawn::new(number)));
            println!("# {USAGE}");
            Ok(())
        }
        _ => Err(USAGE.into()),
    }
}

fn machine(calibration: &str) -> Result<Machine> {
    let calibration = Calibration::from_toml(&fs::read_to_string(calibration)?)?;
    Ok(calibration.apply(published(MACHINE)?)?)
}

/// The lower quartile: others use the processors, too.
fn quartile(mut list: Vec<f64>) -> f64 {
    list.sort_by(f64::total_cmp);
    list.get(list.len() / 4).copied().unwrap_or_default()
}
