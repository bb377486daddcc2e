//! Published linear exchanges of NCCL.

use super::{
    Check, Errors, PointRole, PublishedRow, PublishedTable, ValidationReport, even, held_out,
};
use crate::fit::{Point, fit};
use crate::{Machine, ReadError, published, read};
use moesaic_plan::AllToAll;
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Data {
    set: Vec<Set>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Set {
    name: String,
    machine: String,
    point: Vec<Published>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Published {
    nodes: usize,
    mib: f64,
    ms: f64,
    role: PointRole,
}

impl Published {
    fn seconds(&self, machine: &Machine) -> f64 {
        let ranks = self.nodes * machine.per_node();
        even(machine, ranks, self.mib * 1024.0 * 1024.0, AllToAll::Linear)
            .time
            .seconds
    }
}

/// Returns the machine with other figures of its network.
fn with(mut machine: Machine, constants: &[f64]) -> Machine {
    let level = &mut machine.levels[1];
    level.alpha_us = constants[0] * 1e6;
    level.half_size_kib = constants[1];
    level.bandwidth_gbs = constants[2];
    level.half_peers = constants[3];
    machine
}

/// Returns fixed time, half-bandwidth size, rate and half-bandwidth peers of a machine's network,
/// fitted to the calibration points of SimAI's table.
pub(super) fn network(data_machine: &Machine, points: &[(usize, f64, f64)]) -> Vec<f64> {
    let point = |&(nodes, mib, ms): &(usize, f64, f64)| Point {
        terms: vec![nodes as f64, mib],
        measured: ms * 1e-3,
    };
    let points: Vec<Point> = points.iter().map(point).collect();
    let model = |constants: &[f64], terms: &[f64]| {
        let machine = with(data_machine.clone(), constants);
        let (ranks, bytes) = (terms[0] as usize * machine.per_node(), terms[1] * 1048576.0);
        closed(&machine, ranks, bytes)
    };
    fit(&[117e-6, 31.0, 48.5, 1.9], &points, model).constants
}

/// Returns the seconds of the same phase as the linear exchange, in closed form for fits.
fn closed(machine: &Machine, ranks: usize, bytes: f64) -> f64 {
    use crate::exchange::{LevelLoad, Phase};
    let (m, n) = (machine.per_node() as f64, ranks as f64);
    let mut phase = Phase::default();
    phase.loads[0] = LevelLoad::even(m - 1.0, bytes * (m - 1.0) / n);
    phase.loads[1] = LevelLoad::even(n - m, bytes * (n - m) / n);
    phase.own = 2.0 * bytes / n;
    machine.phase(&phase).seconds
}

pub(super) fn run(report: &mut ValidationReport) -> Result<(), ReadError> {
    let text = include_str!("../../data/nccl.toml");
    let data: Data = read::toml("the table of NCCL's exchanges", text)?;
    let h800 = published("h800")?;
    let points = data.set.iter().flat_map(|set| &set.point);
    let points = points.filter(|point| point.role == PointRole::Calibration);
    let points: Vec<_> = points
        .map(|point| (point.nodes, point.mib, point.ms))
        .collect();
    let found = network(&h800, &points);
    let level = &h800.levels[1];
    let kept = [
        level.alpha_us * 1e-6,
        level.half_size_kib,
        level.bandwidth_gbs,
        level.half_peers,
    ];
    let off = found
        .iter()
        .zip(kept)
        .map(|(found, kept)| (kept / found - 1.0).abs());
    let off = off.fold(0.0, f64::max);
    report.checks.push(Check::new(
        "the file h800 has what the fit of SimAI's 2 and 8 nodes finds, to 2 %",
        off <= 0.02,
        format!("{found:.4?} against {kept:.4?}"),
    ));
    let mut all = Vec::new();
    for set in &data.set {
        let base = published(&set.machine)?;
        let machine = with(base, &found);
        let row = |point: &Published| PublishedRow {
            point: format!("{} nodes, {} MiB", point.nodes, point.mib),
            role: point.role,
            measured: point.ms,
            predicted: point.seconds(&machine) * 1e3,
        };
        let rows: Vec<PublishedRow> = set.point.iter().map(row).collect();
        all.extend(held_out(&rows).cloned());
        let errors = Errors::of(held_out(&rows));
        report.checks.push(Check::new(
            format!("{}: at most 20 % on what was held out", set.name),
            errors.worst <= 0.20,
            errors.to_string(),
        ));
        report.tables.push(PublishedTable {
            name: set.name.clone(),
            unit: "ms".to_string(),
            constants: format!(
                "{:.0} us, half of {:.1} KiB, {:.1} GB/s, half of {:.2} peers",
                found[0] * 1e6,
                found[1],
                found[2],
                found[3]
            ),
            rows,
        });
    }
    let errors = Errors::of(&all);
    report.checks.push(Check::new(
        "NCCL's linear exchange: at most 10 % on average",
        errors.mean <= 0.10,
        errors.to_string(),
    ));
    Ok(())
}
