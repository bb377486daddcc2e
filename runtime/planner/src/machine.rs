//! The model of a machine, read from a file.

mod check;

use crate::error::PlannerError;
use crate::read::{self, ReadError};
use moesaic_kernel::{DType, Target};
use moesaic_plan::{AllToAll, OverlapBy};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A machine: its levels of links from the innermost out, its processors, and the uncertainty of
/// predictions. Every table names the source of its figures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The common name.
    pub name: String,
    /// The hardware it consists of.
    pub about: String,
    /// The target that kernels are planned for: `cuda:sm_90a`.
    pub target: Target,
    /// The links, innermost first.
    #[doc(hidden)]
    #[serde(rename = "level")]
    pub levels: Vec<Level>,
    /// The processor of one rank.
    #[doc(hidden)]
    pub compute: Compute,
    /// The interaction of transfers and arithmetic.
    #[doc(hidden)]
    pub overlap: OverlapModel,
    /// The uncertainty of predictions.
    #[doc(hidden)]
    pub error: Band,
    /// The factors by which measured steps took longer than predicted, by all-to-all algorithm.
    /// Values between two sizes or degrees are interpolated; beyond them the nearest applies.
    #[doc(hidden)]
    #[serde(default, rename = "all_to_all", skip_serializing_if = "Vec::is_empty")]
    pub all_to_all_factors: Vec<AllToAllFactor>,
    /// The factor by which steps of whole models took longer than predicted, if that was measured.
    #[doc(hidden)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelFactor>,
}

/// The factor by which micro-batches of whole models took longer than their parts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelFactor {
    /// The factor on the time.
    pub by: f64,
    /// The source of the factor.
    pub source: String,
}

/// Links of one kind. The ranks of a unit communicate over them, unless an inner level already
/// connects them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Level {
    /// The name: `nvlink`.
    pub name: String,
    /// The inner units (ranks, at the innermost level) of a unit. 0 means any number and is
    /// allowed at the outermost level alone.
    pub radix: usize,
    /// The fixed time of an exchange over these links in microseconds.
    pub alpha_us: f64,
    /// The bandwidth of a link in each direction, in GB/s (10^9 bytes).
    pub bandwidth_gbs: f64,
    /// The time of a message that does not depend on its size, expressed in KiB that the link
    /// would move in that time: a message of this size reaches half the bandwidth.
    #[serde(default)]
    pub half_size_kib: f64,
    /// The number of peers with which a rank reaches half of its bandwidth, because one peer does
    /// not keep all connections busy; 0 where one peer does.
    #[serde(default)]
    pub half_peers: f64,
    /// The cost of many peers.
    #[serde(default)]
    pub fanout: Fanout,
    /// The fraction of fixed times and per-message times that back-to-back exchanges, such as
    /// those of chunks, hide behind transfers: ranks then do not wait for each other, and links
    /// carry both directions. 0 hides nothing, 1 everything. The outermost level's value counts,
    /// and only where `factors` have no measured value for the size.
    #[serde(default)]
    pub hidden: f64,
    /// The factors by which measured exchanges took longer than the figures above predict. Values
    /// between them are interpolated; beyond them the nearest applies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub factors: Vec<Factor>,
    /// The ranks that share a link.
    #[serde(default = "one")]
    pub shared: usize,
    /// The source of the figures.
    pub source: String,
}

/// The cost of many peers: transfers take `1 + per_peer * (peers - free)` times as long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fanout {
    /// The number of peers that cost nothing.
    pub free: f64,
    /// The fraction of the transfer that each further peer costs.
    pub per_peer: f64,
}

/// The factor by which an exchange took longer than its level's figures predict.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Factor {
    /// The ranks that each rank sent to.
    pub peers: f64,
    /// The size of each message in KiB.
    pub kib: f64,
    /// The factor on the time.
    pub by: f64,
    /// The fraction of that time that a back-to-back exchange takes, if that was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub again: Option<f64>,
}

/// The factor by which rows took longer than links predict, by all-to-all algorithm and chunks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllToAllFactor {
    /// The algorithm: `2dh-inter-first`.
    pub name: AllToAll,
    /// The split into chunks; a split that was not measured uses the factor of
    /// [`OverlapBy::Rows`].
    #[serde(default)]
    pub overlap_by: OverlapBy,
    /// The number of chunks.
    #[serde(default = "whole")]
    pub overlap_degree: usize,
    /// The size of a message between nodes, or inside the node where all ranks share one.
    pub message_kib: f64,
    /// The factor on the time.
    pub by: f64,
}

fn whole() -> usize {
    1
}

/// The processor of one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compute {
    /// The memory traffic, reads and writes together, in GB/s.
    pub memory_gbs: f64,
    /// The memory of a rank in GiB.
    pub memory_gib: f64,
    /// The rate of large GEMMs in TFLOP/s, by element type: as reached, not the peak.
    pub gemm_tflops: BTreeMap<String, f64>,
    /// The peak of the arithmetic units in TFLOP/s, by element type. Nothing is predicted by it;
    /// the FLOP use of a model is a fraction of it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub peak_tflops: BTreeMap<String, f64>,
    /// The blocks of a GEMM that run at once.
    pub multiprocessors: usize,
    /// The fixed time of a launch in microseconds.
    pub launch_us: f64,
    /// The ranks per processor where ranks share one. Rates are those of a rank while all are
    /// busy; a rank with more work than others later has more of the processor to itself.
    #[serde(default = "alone", skip_serializing_if = "is_alone")]
    pub ranks_per_processor: f64,
    /// The source of the figures.
    pub source: String,
}

fn alone() -> f64 {
    1.0
}

fn is_alone(ranks: &f64) -> bool {
    *ranks == alone()
}

/// The interaction of transfers and arithmetic.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverlapModel {
    /// Whether messages of inner and outer levels move concurrently within one exchange.
    pub side_by_side: bool,
    /// The fraction by which GEMMs slow down while rows are in flight.
    pub compute_slowdown: f64,
    /// The fraction by which transfers slow down while GEMMs run.
    pub transfer_slowdown: f64,
    /// The multiprocessors that an exchange occupies.
    pub multiprocessors: usize,
    /// The source of the figures.
    pub source: String,
}

/// The uncertainty of predictions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Band {
    /// The band as a fraction of the prediction, in both directions.
    pub band: f64,
    /// The ranks up to which it holds: those of the largest measurement behind it.
    pub ranks: usize,
    /// The basis of the band.
    pub source: String,
}

const fn one() -> usize {
    1
}

/// The name of the rates of FP8, of both layouts.
const FP8: &str = "fp8";

/// The machine files that ship, by name.
const PUBLISHED: &[(&str, &str)] = &[
    ("ndm-a100-v4", include_str!("../machines/ndm-a100-v4.toml")),
    ("h100-ib", include_str!("../machines/h100-ib.toml")),
    ("h800", include_str!("../machines/h800.toml")),
    ("gb200-nvl72", include_str!("../machines/gb200-nvl72.toml")),
    ("gb300-nvl72", include_str!("../machines/gb300-nvl72.toml")),
    ("mi300x-cx7", include_str!("../machines/mi300x-cx7.toml")),
    (
        "hiermoe-a6000",
        include_str!("../machines/hiermoe-a6000.toml"),
    ),
    (
        "mpi-emulated",
        include_str!("../machines/mpi-emulated.toml"),
    ),
];

/// Returns the names of machines that ship.
pub fn published_names() -> impl Iterator<Item = &'static str> {
    PUBLISHED.iter().map(|(name, _)| *name)
}

/// Returns a machine that ships, by name.
///
/// # Errors
/// [`ReadError::Unknown`] with the likely name and all names.
pub fn published(name: &str) -> Result<Machine, ReadError> {
    let found = PUBLISHED.iter().find(|(known, _)| *known == name);
    let (_, text) = found.ok_or_else(|| {
        let meant = read::closest(name, published_names());
        let known: Vec<&str> = published_names().collect();
        ReadError::Unknown {
            name: name.to_string(),
            meant: meant.map_or_else(String::new, |meant| format!("; did you mean `{meant}`?")),
            known: known.join(", "),
        }
    })?;
    Machine::from_toml(text)
}

impl Machine {
    /// Reads a machine.
    ///
    /// # Errors
    /// [`ReadError`] names the key, its range, and for a misspelled key the likely one.
    pub fn from_toml(text: &str) -> Result<Machine, ReadError> {
        let machine: Machine = read::toml("the machine", text)?;
        machine.check()?;
        Ok(machine)
    }
}

// The simulator asks these.
#[doc(hidden)]
impl Machine {
    /// Returns the machine with another number of ranks in an innermost unit.
    #[must_use]
    pub fn with_per_node(mut self, ranks: usize) -> Machine {
        let ranks = ranks.max(1);
        if let Some(level) = self.levels.first_mut().filter(|level| level.radix != ranks) {
            level.radix = ranks;
            self.about = format!("{}; here {ranks} a node", self.about);
        }
        // Fewer ranks than share a link have it to themselves.
        let units = self.units();
        for (at, level) in self.levels.iter_mut().enumerate() {
            level.shared = level.shared.min(units[at.saturating_sub(1)]);
        }
        self
    }

    /// Checks that the machine has this many ranks.
    ///
    /// # Errors
    /// [`PlannerError::Ranks`] where its outermost level has a bound below that.
    pub fn check_ranks(&self, world: usize) -> Result<(), PlannerError> {
        let most = self.units().last().copied().unwrap_or(usize::MAX);
        if world <= most {
            return Ok(());
        }
        Err(PlannerError::Ranks {
            machine: self.name.clone(),
            most,
            world,
        })
    }

    /// Returns [`Level::hidden`] of the outermost level.
    pub(crate) fn hidden(&self) -> f64 {
        self.levels.last().map_or(0.0, |level| level.hidden)
    }

    /// Returns the ranks of an innermost unit.
    pub fn per_node(&self) -> usize {
        match self.levels[0].radix {
            0 => usize::MAX,
            radix => radix,
        }
    }

    /// Returns the ranks of a unit at each level.
    pub fn units(&self) -> Vec<usize> {
        let mut ranks = 1usize;
        let grown = self.levels.iter().map(|level| {
            ranks = match level.radix {
                0 => usize::MAX,
                radix => ranks.saturating_mul(radix),
            };
            ranks
        });
        grown.collect()
    }

    /// Returns the FLOP/s of large GEMMs of a type; f32's rate for a type without one.
    pub fn gemm_rate(&self, dtype: DType) -> f64 {
        let rates = &self.compute.gemm_tflops;
        let own = rates.get(dtype.name()).or_else(|| rates.get("f32"));
        // A file with a single rate means it for every type.
        let any = own.or_else(|| rates.values().next());
        any.copied().unwrap_or(1.0) * 1e12
    }

    /// Returns the peak FLOP/s of a type, if the file has it.
    pub fn peak(&self, dtype: DType) -> Option<f64> {
        let peak = self.compute.peak_tflops.get(dtype.name());
        peak.map(|tflops| tflops * 1e12)
    }

    /// Returns the FLOP/s of GEMMs in FP8, if the file has a rate named `fp8`.
    pub fn fp8_rate(&self) -> Option<f64> {
        let rate = self.compute.gemm_tflops.get(FP8);
        rate.map(|tflops| tflops * 1e12)
    }

    /// Returns the peak FLOP/s in FP8, if the file has it.
    pub fn fp8_peak(&self) -> Option<f64> {
        let peak = self.compute.peak_tflops.get(FP8);
        peak.map(|tflops| tflops * 1e12)
    }

    /// Returns the bytes of memory traffic per second.
    pub fn memory_rate(&self) -> f64 {
        self.compute.memory_gbs * 1e9
    }

    /// Returns the factor on the time of rows for an algorithm, chunks and message size.
    pub fn all_to_all(
        &self,
        all_to_all: AllToAll,
        overlap_by: OverlapBy,
        overlap_degree: usize,
        bytes: f64,
    ) -> f64 {
        let by = |overlap_by| {
            let own = move |factor: &&AllToAllFactor| {
                factor.name == all_to_all && factor.overlap_by == overlap_by
            };
            self.all_to_all_factors.iter().filter(own)
        };
        // Fall back as a whole: mixing factors of both splits would interpolate between unrelated
        // steps.
        let overlap_by = if by(overlap_by).next().is_some() {
            overlap_by
        } else {
            OverlapBy::Rows
        };
        let points = by(overlap_by).map(|own| [own.overlap_degree as f64, own.message_kib, own.by]);
        interpolated(points, overlap_degree as f64, bytes.max(1.0) / 1024.0)
    }

    /// Returns the seconds of an empty launch.
    pub fn launch(&self) -> f64 {
        self.compute.launch_us * 1e-6
    }
}

impl Level {
    /// Returns the bytes per second that one rank has of its link while all ranks that share it
    /// are busy, given its number of peers.
    pub fn rate(&self, peers: f64) -> f64 {
        let few = if self.half_peers > 0.0 && peers > 0.0 {
            peers / (peers + self.half_peers)
        } else {
            1.0
        };
        let many = 1.0 + self.fanout.per_peer * (peers - self.fanout.free).max(0.0);
        self.alone() * few / many
    }

    /// Returns the same rate where the number of peers does not matter.
    pub fn alone(&self) -> f64 {
        self.bandwidth_gbs * 1e9 / self.shared as f64
    }

    /// Returns the seconds per message that do not depend on its size.
    pub fn per_message(&self) -> f64 {
        self.half_size_kib * 1024.0 / self.alone()
    }

    /// Returns the factor on the time of messages to `peers` peers with `bytes` bytes each.
    pub fn factor(&self, peers: f64, bytes: f64) -> f64 {
        factor(&self.factors, peers, bytes / 1024.0)
    }

    /// Returns the fraction of their time that such messages take back to back, if that was
    /// measured.
    pub fn again(&self, peers: f64, bytes: f64) -> Option<f64> {
        let point = |own: &Factor| Some([own.peers, own.kib, own.again?]);
        let points = self.factors.iter().filter_map(point);
        points.clone().next()?;
        Some(interpolated(points, peers, bytes / 1024.0).min(1.0))
    }
}

/// Interpolates between sizes for each measured number of peers, then between numbers of peers. 1
/// where nothing was measured.
pub(crate) fn factor(factors: &[Factor], peers: f64, kib: f64) -> f64 {
    let points = factors.iter().map(|own| [own.peers, own.kib, own.by]);
    interpolated(points, peers, kib)
}

/// Interpolates points `[number, size, value]`: between sizes for each number, then between
/// numbers. 1 where there are none.
fn interpolated(points: impl Iterator<Item = [f64; 3]> + Clone, number: f64, size: f64) -> f64 {
    let of_number = |number: f64| {
        let same = points.clone().filter(move |point| point[0] == number);
        let of_size = |size: f64| {
            let found = same.clone().find(|point| point[1] == size);
            found.map_or(1.0, |point| point[2])
        };
        between(same.clone().map(|point| point[1]), size, of_size)
    };
    between(points.clone().map(|point| point[0]), number, of_number)
}

/// Interpolates logarithmically between the two nearest known places; beyond them the nearest
/// applies, and 1 where there is none.
fn between(places: impl Iterator<Item = f64>, at: f64, value: impl Fn(f64) -> f64) -> f64 {
    around(places, at).map_or(1.0, |([low, high], part)| {
        // Factors are ratios, so their geometric mean is the natural one.
        value(low).powf(1.0 - part) * value(high).powf(part)
    })
}

/// Returns the nearest places below and above, and the logarithmic fraction between them; beyond
/// all places the nearest twice.
fn around(places: impl Iterator<Item = f64>, at: f64) -> Option<([f64; 2], f64)> {
    let (mut below, mut above) = (None::<f64>, None::<f64>);
    for place in places {
        if place <= at {
            below = Some(below.map_or(place, |other| other.max(place)));
        } else {
            above = Some(above.map_or(place, |other| other.min(place)));
        }
    }
    match (below, above) {
        (Some(low), Some(high)) => Some(([low, high], (at / low).ln() / (high / low).ln())),
        (Some(nearest), None) | (None, Some(nearest)) => Some(([nearest; 2], 0.0)),
        (None, None) => None,
    }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
