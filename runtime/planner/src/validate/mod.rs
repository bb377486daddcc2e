//! Published measurements compared with the model.
//!
//! Points with the role `calibration` give the constants; only the errors of held-out points
//! count. docs/SCALE.md has the table.

mod dedicated;
mod hiermoe;
mod layers;
mod models;
mod nccl;
mod shapes;
mod tutel;

pub use models::{MeshRank, MeshRankLine, mesh_ranks};

use crate::collective_ops::{ExchangedRows, OpCost};
use crate::exchange::MOST_LEVELS;
use crate::geometry;
use crate::{Machine, RoutedRows};
use moesaic_plan::{AllToAll, Parallel, Placement};
use serde::Deserialize;
use std::fmt::{self, Write};

/// The role of a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum PointRole {
    /// The constants are fitted to it.
    #[serde(rename = "calibration")]
    Calibration,
    /// No constant is fitted to it.
    #[serde(rename = "held out")]
    HeldOut,
}

/// A published number and the model's prediction.
#[derive(Clone, Debug)]
pub struct PublishedRow {
    /// The name of the point.
    pub point: String,
    /// Its role.
    pub role: PointRole,
    /// The published number.
    pub measured: f64,
    /// The model's number.
    pub predicted: f64,
}

impl PublishedRow {
    /// Returns the signed relative error.
    pub fn error(&self) -> f64 {
        self.predicted / self.measured - 1.0
    }
}

/// The numbers of one source.
#[derive(Clone, Debug)]
pub struct PublishedTable {
    /// The source.
    pub name: String,
    /// The unit of its numbers: `us`, `GB/s`.
    pub unit: String,
    /// The fitted constants.
    pub constants: String,
    /// Its points.
    pub rows: Vec<PublishedRow>,
}

/// A claim about the model.
#[derive(Clone, Debug)]
pub struct Check {
    /// The target.
    pub claim: String,
    /// The result.
    pub found: String,
    /// Whether it holds.
    pub holds: bool,
    /// The reason of a known miss of the target.
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

/// The complete comparison.
#[derive(Clone, Debug, Default)]
pub struct ValidationReport {
    /// The published and predicted numbers.
    pub tables: Vec<PublishedTable>,
    /// The claims.
    pub checks: Vec<Check>,
}

/// Fits, predicts and checks all tables that ship.
///
/// # Errors
/// [`ReadError`](crate::ReadError) of a table that cannot be read.
pub fn run() -> Result<ValidationReport, crate::ReadError> {
    let mut report = ValidationReport::default();
    dedicated::run(&mut report)?;
    nccl::run(&mut report)?;
    hiermoe::run(&mut report)?;
    tutel::run(&mut report)?;
    shapes::run(&mut report)?;
    models::run(&mut report)?;
    Ok(report)
}

impl ValidationReport {
    /// Returns whether every claim holds that is not known to be missed.
    pub fn holds(&self) -> bool {
        self.checks
            .iter()
            .all(|check| check.holds || check.known_miss.is_some())
    }

    /// Returns the comparison as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for table in &self.tables {
            let _ = writeln!(text, "{} [{}]; {}", table.name, table.unit, table.constants);
            for row in &table.rows {
                let role = match row.role {
                    PointRole::Calibration => "calibration",
                    PointRole::HeldOut => "held out",
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

/// How far predictions are from what was measured, as parts of that.
struct Errors {
    mean: f64,
    worst: f64,
    points: usize,
}

impl Errors {
    fn of<'r>(rows: impl IntoIterator<Item = &'r PublishedRow>) -> Errors {
        let errors: Vec<f64> = rows.into_iter().map(|row| row.error().abs()).collect();
        let points = errors.len();
        Errors {
            mean: errors.iter().sum::<f64>() / points.max(1) as f64,
            worst: errors.into_iter().fold(0.0, f64::max),
            points,
        }
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mean, worst) = (percent(self.mean), percent(self.worst));
        write!(f, "mean {mean}, worst {worst}, {} points", self.points)
    }
}

fn held_out(rows: &[PublishedRow]) -> impl Iterator<Item = &PublishedRow> {
    rows.iter().filter(|row| row.role == PointRole::HeldOut)
}

fn percent(part: f64) -> String {
    format!("{:.1} %", 100.0 * part)
}

/// Returns the cost of an exchange of `bytes` bytes of every rank, an equal part for each rank,
/// by an algorithm's messages.
fn even(machine: &Machine, ranks: usize, bytes: f64, all_to_all: AllToAll) -> OpCost {
    even_in(machine, ranks, bytes, all_to_all, 1.0)
}

/// Returns the same cost where a message is split into `chunks`.
fn even_in(
    machine: &Machine,
    ranks: usize,
    bytes: f64,
    all_to_all: AllToAll,
    chunks: f64,
) -> OpCost {
    let routing = RoutedRows::even(ranks as u64, ranks, 1);
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
    let carried = ExchangedRows {
        row: bytes / ranks as f64,
        own: bytes / ranks as f64,
        peers: 1.0,
        crossing: bytes / ranks as f64,
        cast_ratio: 1.0,
        there: true,
        dedup: true,
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
        // A known miss that now holds must become an ordinary claim.
        let stale = |check: &&Check| check.holds && check.known_miss.is_some();
        let stale: Vec<_> = report.checks.iter().filter(stale).collect();
        assert!(stale.is_empty(), "no longer missed: {stale:?}");
    }
}
