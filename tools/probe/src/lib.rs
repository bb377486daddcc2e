//! The probe runs each hardware primitive as a small kernel, built from the
//! named device functions of real kernels, and compares bits with the tables of
//! `moesaic-hardware`.
//!
//! Inputs are random, and every sum of them is exact in f32, so the order in
//! which hardware adds does not matter. On a simulator the probe checks the
//! simulator and itself; on a GPU it confirms the tables.

pub mod bench;
pub mod command;
pub mod date;
pub mod idle;
pub mod idle_driver;
pub mod kept;
pub mod open;
pub mod probes;
pub mod random;
pub mod report;
mod text;

use bench::Bench;
use probes::Probe;
use random::Random;
use report::{Outcome, Report, Row};

/// Runs every probe. `tell` receives each row as it comes.
pub fn run(bench: &Bench, tell: impl FnMut(&Row)) -> Report {
    run_some(bench, "", tell)
}

/// Runs the probes that have `part` in their names.
pub fn run_some(bench: &Bench, part: &str, mut tell: impl FnMut(&Row)) -> Report {
    let mut report = Report::default();
    for probe in probes::all().filter(|probe| probe.name.contains(part)) {
        let rows = try_one(probe, bench);
        rows.iter().for_each(&mut tell);
        report.rows.extend(rows);
    }
    report
}

/// Runs one probe; returns a row that says so if it does not finish.
pub fn try_one(probe: &Probe, bench: &Bench) -> Vec<Row> {
    let has = bench.capability();
    if has < probe.capability {
        let needs = probe.capability;
        return vec![Row::not_run(
            probe.name,
            format!("needs sm_{needs}, this is sm_{has}"),
        )];
    }
    let mut random = Random::new(u64::from(probe.capability) + probe.name.len() as u64);
    (probe.run)(bench, &mut random).unwrap_or_else(|trouble| {
        vec![Row {
            primitive: probe.name.to_string(),
            cases: 0,
            outcome: Outcome::Failed(trouble.to_string()),
        }]
    })
}
