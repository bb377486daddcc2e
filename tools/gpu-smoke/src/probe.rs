//! The probe, watched: a primitive that hangs or faults costs itself alone.

use crate::watch::{self, Pieces, Process, Word};
use crate::{ABSENT, CUT, Result};
use clap::Args;
use moesaic_probe::open::{Kernels, open};
use moesaic_probe::probes::{self, Probe};
use moesaic_probe::report::{Outcome, Row};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// What is probed.
#[derive(Args)]
pub struct Options {
    /// `cuda`, or a simulator such as `sim:sm_90a`.
    #[arg(long)]
    device: String,
    /// The folder with the kernels, for `cuda`.
    #[arg(long)]
    from: Option<PathBuf>,
    /// Only the primitives with this in their names.
    #[arg(long, default_value = "")]
    only: String,
    /// Seconds that a primitive may take.
    #[arg(long, default_value_t = 20)]
    each: u64,
    /// Seconds after which no process is started.
    #[arg(long, default_value_t = 3600)]
    seconds: u64,
    /// In this process.
    #[arg(long)]
    here: bool,
    /// The first primitive.
    #[arg(long, default_value_t = 0, overrides_with = "first")]
    first: usize,
}

/// Compares every primitive with the tables: 0 when all agree, 1 when one does not, 4 when
/// time was up before.
///
/// # Errors
/// When no process can be started.
pub fn run(options: &Options) -> Result<ExitCode> {
    let wanted = |probe: &&Probe| probe.name.contains(&options.only);
    let probes: Vec<_> = probes::all().filter(wanted).collect();
    if options.here {
        return here(options, &probes);
    }
    let pieces = Pieces {
        count: probes.len(),
        each: Duration::from_secs(options.each),
        end: Instant::now() + Duration::from_secs(options.seconds),
    };
    let start = |first: usize, _: &_| {
        let mut command = watch::again()?;
        Process::start(command.args(["--first", &first.to_string()]))
    };
    let lost = |piece: usize, why: &str| {
        let name = probes[piece].name;
        println!("{}", row(name, Outcome::Failed(why.to_string())));
    };
    let came = pieces.run(start, |line| println!("{line}"), lost)?;
    if let Some(code) = came.refused {
        return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)));
    }
    let [agree, differ, failed, not_run] = came.counts;
    let (failed, left) = (failed + came.lost.len(), came.left);
    print!("{agree} agree, {differ} differ, {failed} failed, {not_run} not run");
    println!(", {left} primitives were not begun");
    Ok(ExitCode::from(match (differ + failed, left) {
        (0, 0) => 0,
        (0, _) => CUT,
        _ => 1,
    }))
}

fn row(name: &str, outcome: Outcome) -> Row {
    Row {
        primitive: name.to_string(),
        cases: 0,
        outcome,
    }
}

fn here(options: &Options, probes: &[&Probe]) -> Result<ExitCode> {
    let kernels = options.from.clone();
    let bench = match open(
        &options.device,
        &kernels.map_or(Kernels::Compiled, Kernels::Kept),
    ) {
        Ok(bench) => bench,
        Err(error) => {
            println!("error: {error}");
            return Ok(ExitCode::from(ABSENT));
        }
    };
    if options.first == 0 {
        println!("{}", bench.description());
    }
    for (number, probe) in probes.iter().enumerate().skip(options.first) {
        Word::Begun(number).say();
        let rows = moesaic_probe::try_one(probe, &bench);
        rows.iter().for_each(|row| println!("{row}"));
        let count = |of: fn(&Outcome) -> bool| rows.iter().filter(|row| of(&row.outcome)).count();
        let failed = count(|it| matches!(it, Outcome::Failed(_)));
        Word::Counts([
            count(|it| *it == Outcome::Agrees),
            count(|it| matches!(it, Outcome::Differs(_))),
            failed,
            count(|it| matches!(it, Outcome::NotRun(_))),
        ])
        .say();
        if failed > 0 && bench.is_broken() {
            Word::Again.say();
            return Ok(ExitCode::FAILURE);
        }
    }
    Word::Done.say();
    Ok(ExitCode::SUCCESS)
}
