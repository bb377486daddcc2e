//! Published measurements, and how far the model is from them.
//!
//! Constants come from points whose role is `calibration`; errors that count are those of
//! points that were held out. docs/SCALE.md has the table.

mod dedicated;
mod hiermoe;
mod layers;
mod nccl;
mod shapes;
mod tutel;

use crate::collective_ops::{Carried, OpCost};
use crate::exchange::MOST_LEVELS;
use crate::geometry;
use crate::{Machine, Routing};
use moesaic_plan::{AllToAll, Parallel, Placement};
use serde::Deserialize;
use std::fmt::Write;

/// What a point is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Role {
    /// Constants come from it.
    #[serde(rename = "calibration")]
    Calibration,
    /// No constant does.
    #[serde(rename = "held out")]
    HeldOut,
}

/// A published number, and what the model says.
#[derive(Clone, Debug)]
pub struct Row {
    /// Of which.
    pub point: String,
    /// What it is for.
    pub role: Role,
    /// Published.
    pub measured: f64,
    /// By the model.
    pub predicted: f64,
}

impl Row {
    /// The relative error, with its sign.
    pub fn error(&self) -> f64 {
        self.predicted / self.measured - 1.0
    }
}

/// Numbers of one source.
#[derive(Clone, Debug)]
pub struct Table {
    /// What it is.
    pub name: String,
    /// Of its numbers: `us`, `GB/s`.
    pub unit: String,
    /// Constants that were found.
    pub constants: String,
    /// Its points.
    pub rows: Vec<Row>,
}

/// Something that is claimed of the model.
#[derive(Clone, Debug)]
pub struct Check {
    /// What is wanted.
    pub claim: String,
    /// What is.
    pub found: String,
    /// Whether it holds.
    pub holds: bool,
    /// Why it may not: a target that is missed, and known to be.
    pub known_miss: Option<String>,
}

impl Check {
    fn new(claim: impl Into<String>, holds: bool, found: String) -> Check {
        Check {
            claim: claim.into(),
            found,
            holds,
            known_miss: None,
        }
    }

    fn known(mut self, why: Option<&str>) -> Check {
        self.known_miss = why.map(str::to_string);
        self
    }
}

/// All of it.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Numbers beside numbers.
    pub tables: Vec<Table>,
    /// What is claimed.
    pub checks: Vec<Check>,
}

/// Fits, predicts and checks all tables that ship.
///
/// # Errors
/// What a table cannot be read for.
pub fn run() -> Result<Report, crate::ReadError> {
    let mut report = Report::default();
    dedicated::run(&mut report)?;
    nccl::run(&mut report)?;
    hiermoe::run(&mut report)?;
    tutel::run(&mut report)?;
    shapes::run(&mut report)?;
    Ok(report)
}

impl Report {
    /// Whether everything holds that is not known to be missed.
    pub fn holds(&self) -> bool {
        self.checks
            .iter()
            .all(|check| check.holds || check.known_miss.is_some())
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for table in &self.tables {
            let _ = writeln!(text, "{} [{}]; {}", table.name, table.unit, table.constants);
            for row in &table.rows {
                let role = match row.role {
                    Role::Calibration => "calibration",
                    Role::HeldOut => "held out",
                };
                let _ = writeln!(
                    text,
                    "  {:<28} {:<12} measured {:>9.4}  predicted {:>9.4}  {:>+6.1} %",
                    row.point,
                    role,
                    row.measured,
                    row.predicted,
                    100.0 * row.error()
                );
            }
        }
        let _ = writeln!(text, "\nchecks");
        for check in &self.checks {
            let said = match (check.holds, &check.known_miss) {
                (true, _) => "holds ".to_string(),
                (false, None) => "FAILS ".to_string(),
                (false, Some(_)) => "missed".to_string(),
            };
            let _ = writeln!(text, "  {said}  {}: {}", check.claim, check.found);
            if let (false, Some(why)) = (check.holds, &check.known_miss) {
                let _ = writeln!(text, "          {why}");
            }
        }
        text
    }
}

/// The mean and the largest of the size of errors.
fn errors<'r>(rows: impl IntoIterator<Item = &'r Row>) -> (f64, f64) {
    let errors: Vec<f64> = rows.into_iter().map(|row| row.error().abs()).collect();
    let mean = errors.iter().sum::<f64>() / errors.len().max(1) as f64;
    (mean, errors.into_iter().fold(0.0, f64::max))
}

fn held_out(rows: &[Row]) -> impl Iterator<Item = &Row> {
    rows.iter().filter(|row| row.role == Role::HeldOut)
}

fn percent(part: f64) -> String {
    format!("{:.1} %", 100.0 * part)
}

/// An exchange of `bytes` of every rank, an equal part to each, as an all-to-all algorithm's messages.
fn even(machine: &Machine, ranks: usize, bytes: f64, all_to_all: AllToAll) -> OpCost {
    even_in(machine, ranks, bytes, all_to_all, 1.0)
}

/// The same where a message is cut into `chunks`.
fn even_in(
    machine: &Machine,
    ranks: usize,
    bytes: f64,
    all_to_all: AllToAll,
    chunks: f64,
) -> OpCost {
    let routing = Routing::even(ranks as u64, ranks, 1);
    let mesh = Parallel {
        ep: ranks,
        ..Parallel::default()
    };
    let placed = Placement::contiguous(ranks, ranks);
    let mut all = geometry::ranks(machine, mesh, (&routing, &placed), (all_to_all, 1), None);
    let mut rank = all.swap_remove(0);
    for phase in &mut rank.phases {
        for level in 0..MOST_LEVELS {
            phase.loads[level].messages *= chunks;
        }
    }
    let carried = Carried {
        row: bytes / ranks as f64,
        own: bytes / ranks as f64,
        peers: 1.0,
        dedup_indices: bytes / ranks as f64,
        comm_dtype: 1.0,
        there: true,
        once: true,
        side_by_side: all_to_all == AllToAll::TwoDhConcurrent,
    };
    carried.cost_of(machine, &rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_claimed_of_the_model_holds() {
        let report = run().unwrap();
        assert!(report.holds(), "{}", report.text());
        // A claim that has come true is one.
        let stale = |check: &&Check| check.holds && check.known_miss.is_some();
        let stale: Vec<_> = report.checks.iter().filter(stale).collect();
        assert!(stale.is_empty(), "no longer missed: {stale:?}");
    }
}
