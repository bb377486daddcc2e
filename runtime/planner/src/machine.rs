//! What a machine is to the model: data, read from a file.

use crate::exchange::MOST_LEVELS;
use crate::read::{self, ReadError};
use moesaic_kernel::{DType, Target};
use moesaic_plan::{AllToAll, OverlapBy};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A machine: levels of links from the innermost out, what its processors do, and how far
/// predictions of it may be off. Every table says where its figures come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// What people call it.
    pub name: String,
    /// What it consists of.
    pub about: String,
    /// What kernels are planned for: `cuda:sm_90a`.
    pub target: Target,
    /// Links, innermost first.
    #[serde(rename = "level")]
    pub levels: Vec<Level>,
    /// What one rank's processor does.
    pub compute: Compute,
    /// What happens where transfers and arithmetic meet.
    pub overlap: Overlap,
    /// How far off predictions may be.
    pub error: Band,
    /// How much longer rows took by an all-to-all algorithm, in steps that were measured, than all of the above
    /// says. What lies between two sizes or degrees is interpolated; what lies beyond is as the
    /// nearest.
    #[serde(default, rename = "all_to_all", skip_serializing_if = "Vec::is_empty")]
    pub all_to_all_factors: Vec<AllToAllFactor>,
}

/// Links of one kind. A rank and the others of its unit talk over them, unless an inner
/// level joins them already.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Level {
    /// `nvlink`.
    pub name: String,
    /// Inner units (ranks, at the innermost level) of a unit; 0, at the outermost level
    /// alone, for as many as there are.
    pub radix: usize,
    /// Fixed time of an exchange over these links, in microseconds.
    pub alpha_us: f64,
    /// What a link moves in each direction, in GB/s (10^9 bytes).
    pub bandwidth_gbs: f64,
    /// Time of a message that does not depend on its size, as what the link would move in
    /// it, in KiB: a message of this size has half the bandwidth.
    #[serde(default)]
    pub half_size_kib: f64,
    /// With so many peers a rank gets half of its bandwidth, as connections are not kept
    /// busy by one peer; 0 where one peer is enough.
    #[serde(default)]
    pub half_peers: f64,
    /// What many peers cost.
    #[serde(default)]
    pub fanout: Fanout,
    /// What of fixed times and messages transfers hide where exchanges follow each other at
    /// once, as those of chunks do: ranks do not wait for each other then, and links carry both
    /// ways. A part from 0, nothing, to 1; that of the outermost level counts, and of fixed times
    /// and messages only where `factors` do not say it for each size.
    #[serde(default)]
    pub hidden: f64,
    /// How much longer measured exchanges took than the figures above say. What lies between
    /// them is interpolated; what lies beyond is as the nearest.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub factors: Vec<Factor>,
    /// Ranks that share a link.
    #[serde(default = "one")]
    pub shared: usize,
    /// Where the figures come from.
    pub source: String,
}

/// What many peers cost: transfers take `1 + per_peer * (peers - free)` times as long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fanout {
    /// Peers that cost nothing.
    pub free: f64,
    /// The part of the transfer that each further one costs.
    pub per_peer: f64,
}

/// How much longer an exchange took than the figures of its level say.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Factor {
    /// Ranks to which each sent.
    pub peers: f64,
    /// To each of them, in KiB.
    pub kib: f64,
    /// So many times as long.
    pub by: f64,
    /// The part of that which it takes where it follows another at once, if that was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub again: Option<f64>,
}

/// How much longer rows took by an all-to-all algorithm, in so many chunks, than links say.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllToAllFactor {
    /// The all-to-all's name: `inter-first`.
    pub name: AllToAll,
    /// What makes a chunk; that of a cut that was not measured is as by [`OverlapBy::Rows`].
    #[serde(default)]
    pub overlap_by: OverlapBy,
    /// How many chunks.
    #[serde(default = "whole")]
    pub overlap_degree: usize,
    /// Size of a message between nodes, or inside one where all ranks are in it.
    pub message_kib: f64,
    /// So many times as long.
    pub by: f64,
}

fn whole() -> usize {
    1
}

/// What one rank's processor does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compute {
    /// Memory traffic, read and write together, in GB/s.
    pub memory_gbs: f64,
    /// Memory of a rank in GiB.
    pub memory_gib: f64,
    /// Rate of large products in TFLOP/s, by element type: what is reached, not the peak.
    pub gemm_tflops: BTreeMap<String, f64>,
    /// Blocks of a product that run at once.
    pub multiprocessors: usize,
    /// Fixed time of a launch, in microseconds.
    pub launch_us: f64,
    /// Ranks for each processor that they share, where they do; rates are those of a rank
    /// while all are at work. A rank with more to do than others has more of it to itself.
    #[serde(default = "alone", skip_serializing_if = "is_alone")]
    pub ranks_per_processor: f64,
    /// Where the figures come from.
    pub source: String,
}

fn alone() -> f64 {
    1.0
}

fn is_alone(ranks: &f64) -> bool {
    *ranks == alone()
}

/// What happens where transfers and arithmetic meet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overlap {
    /// Messages of inner and outer levels move at the same time in one exchange.
    pub side_by_side: bool,
    /// By which part products slow down while rows comm.
    pub compute_slowdown: f64,
    /// By which part transfers slow down while products run.
    pub transfer_slowdown: f64,
    /// Multiprocessors that an exchange takes.
    pub multiprocessors: usize,
    /// Where the figures come from.
    pub source: String,
}

/// How far off predictions may be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Band {
    /// As a part of the prediction, to both parts.
    pub band: f64,
    /// Ranks up to which it holds: the largest measurement behind it.
    pub ranks: usize,
    /// What it rests on.
    pub source: String,
}

const fn one() -> usize {
    1
}

/// Files of machines that ship, by name.
const PUBLISHED: &[(&str, &str)] = &[
    ("ndm-a100-v4", include_str!("../machines/ndm-a100-v4.toml")),
    ("h100-ib", include_str!("../machines/h100-ib.toml")),
    ("h800", include_str!("../machines/h800.toml")),
    ("gb200-nvl72", include_str!("../machines/gb200-nvl72.toml")),
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

/// The names of machines that ship.
pub fn published_names() -> impl Iterator<Item = &'static str> {
    PUBLISHED.iter().map(|(name, _)| *name)
}

/// A machine that ships, by name.
///
/// # Errors
/// [`ReadError::Unknown`] with what was meant, and all names.
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
    /// [`ReadError`]: the key, what it may be, and for a misspelt one what was meant.
    pub fn from_toml(text: &str) -> Result<Machine, ReadError> {
        let machine: Machine = read::toml("the machine", text)?;
        machine.check()?;
        Ok(machine)
    }

    pub(crate) fn check(&self) -> Result<(), ReadError> {
        let wrong = |key: String, value: String, possible| {
            Err(ReadError::Value {
                what: format!("machine {}", self.name),
                key,
                value,
                possible,
            })
        };
        if self.levels.is_empty() || self.levels.len() > MOST_LEVELS {
            let number = self.levels.len().to_string();
            return wrong("levels".to_string(), number, "from 1 to 4 `[[level]]`");
        }
        let last = self.levels.len() - 1;
        for (at, level) in self.levels.iter().enumerate() {
            if level.radix == 0 && at != last {
                let key = format!("{}.radix", level.name);
                return wrong(key, "0".to_string(), "only the last level has no bound");
            }
            if level.shared == 0 {
                let key = format!("{}.shared", level.name);
                return wrong(key, "0".to_string(), "a link is of at least one rank");
            }
            if level.hidden > 1.0 {
                let (key, value) = (format!("{}.hidden", level.name), level.hidden.to_string());
                return wrong(key, value, "a part: from 0 to 1");
            }
        }
        if let Some(all_to_all) = self
            .all_to_all_factors
            .iter()
            .find(|all_to_all| all_to_all.is_at_bound())
        {
            let key = format!("all_to_all.{}.by", all_to_all.name);
            let possible = "between 0.25 and 4: at these bounds it says nothing about the all_to_all, \
                            because the machine was busy or the steps were too short; measure \
                            again, or remove every `[[all_to_all]]`";
            return wrong(key, all_to_all.by.to_string(), possible);
        }
        let shared = self.compute.ranks_per_processor;
        if !(shared.is_finite() && shared >= 1.0) {
            let key = "compute.ranks_per_processor".to_string();
            return wrong(key, shared.to_string(), "1, or more where ranks share one");
        }
        for (key, value, positive) in self.figures() {
            let fits = value.is_finite() && value >= 0.0 && (value > 0.0 || !positive);
            if !fits {
                let possible = if positive {
                    "must be above 0"
                } else {
                    "must not be negative"
                };
                return wrong(key, value.to_string(), possible);
            }
        }
        Ok(())
    }

    /// Every figure, and whether it has to be above zero.
    fn figures(&self) -> Vec<(String, f64, bool)> {
        let (compute, overlap) = (&self.compute, &self.overlap);
        let mut list = vec![
            ("compute.memory_gbs".to_string(), compute.memory_gbs, true),
            ("compute.memory_gib".to_string(), compute.memory_gib, true),
            ("compute.launch_us".to_string(), compute.launch_us, false),
            ("error.band".to_string(), self.error.band, false),
        ];
        let slowdowns = [overlap.compute_slowdown, overlap.transfer_slowdown];
        list.extend(slowdowns.map(|value| ("overlap slowdowns".to_string(), value, false)));
        let processors = compute
            .multiprocessors
            .saturating_sub(overlap.multiprocessors);
        list.push((
            "compute.multiprocessors beyond overlap.multiprocessors".to_string(),
            processors as f64,
            true,
        ));
        let rates = compute.gemm_tflops.iter();
        list.extend(rates.map(|(name, rate)| (format!("gemm_tflops.{name}"), *rate, true)));
        for factor in &self.all_to_all_factors {
            list.push((
                format!("all_to_all.{}.overlap_degree", factor.name),
                factor.overlap_degree as f64,
                true,
            ));
            list.push((
                format!("all_to_all.{}.message_kib", factor.name),
                factor.message_kib,
                true,
            ));
            list.push((format!("all_to_all.{}.by", factor.name), factor.by, true));
        }
        for level in &self.levels {
            let of = |key: &str| format!("{}.{key}", level.name);
            list.push((of("alpha_us"), level.alpha_us, false));
            list.push((of("bandwidth_gbs"), level.bandwidth_gbs, true));
            list.push((of("half_size_kib"), level.half_size_kib, false));
            list.push((of("half_peers"), level.half_peers, false));
            list.push((of("fanout.free"), level.fanout.free, false));
            list.push((of("fanout.per_peer"), level.fanout.per_peer, false));
            list.push((of("hidden"), level.hidden, false));
            for factor in &level.factors {
                list.push((of("factors.peers"), factor.peers, true));
                list.push((of("factors.kib"), factor.kib, true));
                list.push((of("factors.by"), factor.by, true));
                let again = factor.again.map(|part| (of("factors.again"), part, true));
                list.extend(again);
            }
        }
        list
    }

    /// The same with so many ranks in an innermost unit.
    #[must_use]
    pub fn with_per_node(mut self, ranks: usize) -> Machine {
        if let Some(level) = self.levels.first_mut() {
            level.radix = ranks.max(1);
        }
        self
    }

    /// See [`Level::hidden`]: that of the outermost level.
    pub(crate) fn hidden(&self) -> f64 {
        self.levels.last().map_or(0.0, |level| level.hidden)
    }

    /// Ranks of an innermost unit.
    pub fn per_node(&self) -> usize {
        match self.levels[0].radix {
            0 => usize::MAX,
            radix => radix,
        }
    }

    /// Ranks of a unit of each level.
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

    /// FLOP/s of large products on this type; of one that has no rate, f32's.
    pub fn gemm_rate(&self, dtype: DType) -> f64 {
        let rates = &self.compute.gemm_tflops;
        let own = rates.get(dtype.name()).or_else(|| rates.get("f32"));
        let any = own.or_else(|| rates.values().next());
        any.copied().unwrap_or(1.0) * 1e12
    }

    /// Bytes of memory traffic in a second.
    pub fn memory_rate(&self) -> f64 {
        self.compute.memory_gbs * 1e9
    }

    /// How much longer rows take by an all-to-all algorithm, in so many chunks and messages of so many bytes, than
    /// the figures of links say.
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
        let overlap_by = if by(overlap_by).next().is_some() {
            overlap_by
        } else {
            OverlapBy::Rows
        };
        let points = by(overlap_by).map(|own| [own.overlap_degree as f64, own.message_kib, own.by]);
        interpolated(points, overlap_degree as f64, bytes.max(1.0) / 1024.0)
    }

    /// Seconds of a launch alone.
    pub fn launch(&self) -> f64 {
        self.compute.launch_us * 1e-6
    }
}

impl Level {
    /// Bytes a second that one rank has of its link when all that share it are busy and it
    /// has so many peers.
    pub fn rate(&self, peers: f64) -> f64 {
        let few = if self.half_peers > 0.0 && peers > 0.0 {
            peers / (peers + self.half_peers)
        } else {
            1.0
        };
        let many = 1.0 + self.fanout.per_peer * (peers - self.fanout.free).max(0.0);
        self.alone() * few / many
    }

    /// The same where peers do not matter.
    pub fn alone(&self) -> f64 {
        self.bandwidth_gbs * 1e9 / self.shared as f64
    }

    /// Seconds of messages that do not depend on their size.
    pub fn per_message(&self) -> f64 {
        self.half_size_kib * 1024.0 / self.alone()
    }

    /// How much longer messages to so many peers, of so many bytes to each, take than the
    /// other figures say.
    pub fn factor(&self, peers: f64, bytes: f64) -> f64 {
        factor(&self.factors, peers, bytes / 1024.0)
    }

    /// The part of their time that such messages take where they follow others at once, if that
    /// was measured.
    pub fn again(&self, peers: f64, bytes: f64) -> Option<f64> {
        let point = |own: &Factor| Some([own.peers, own.kib, own.again?]);
        let points = self.factors.iter().filter_map(point);
        points.clone().next()?;
        Some(interpolated(points, peers, bytes / 1024.0).min(1.0))
    }
}

/// Between sizes for each number of peers that was measured, then between numbers of peers. 1
/// where nothing was.
pub(crate) fn factor(factors: &[Factor], peers: f64, kib: f64) -> f64 {
    let points = factors.iter().map(|own| [own.peers, own.kib, own.by]);
    interpolated(points, peers, kib)
}

/// Of points `[number, size, value]` the value at a place: between sizes for each number, then
/// between numbers. 1 where there are none.
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

/// The value at a place, by the logarithms between the next two places that are known; beyond
/// them that of the nearest, and 1 where there is none.
fn between(places: impl Iterator<Item = f64>, at: f64, value: impl Fn(f64) -> f64) -> f64 {
    around(places, at).map_or(1.0, |([low, high], part)| {
        value(low).powf(1.0 - part) * value(high).powf(part)
    })
}

/// The next places below and above a place, and how far it is from the first to the second, by
/// their logarithms; beyond all the nearest twice.
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
mod tests {
    use super::*;

    #[test]
    fn every_machine_that_ships_reads() {
        for name in published_names() {
            let machine = published(name).unwrap();
            assert_eq!(machine.name, name);
            assert!(machine.levels.iter().all(|level| !level.source.is_empty()));
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let error = published("h100ib").unwrap_err().to_string();
        assert!(error.contains("did you mean `h100-ib`?"), "{error}");
        let text = include_str!("../machines/h800.toml");
        let read = |from: &str, to: &str| Machine::from_toml(&text.replacen(from, to, 1));
        let error = read("alpha_us", "alhpa_us").unwrap_err().to_string();
        assert!(error.contains("did you mean `alpha_us`?"), "{error}");
        let error = read("radix = 8", "radix = 0").unwrap_err().to_string();
        assert!(error.contains("nvlink.radix = 0; only the last"), "{error}");
        let error = read("alpha_us", "hidden = 1.5\nalpha_us").unwrap_err();
        assert!(
            error.to_string().contains("nvlink.hidden = 1.5; a part"),
            "{error}"
        );
        let error = read("memory_gbs = ", "memory_gbs = -")
            .unwrap_err()
            .to_string();
        assert!(error.contains("must be above 0"), "{error}");
    }

    #[test]
    fn links_have_half_of_their_rate_where_they_say_so() {
        let level = Level {
            name: "link".to_string(),
            radix: 0,
            alpha_us: 0.0,
            bandwidth_gbs: 40.0,
            half_size_kib: 4.0,
            half_peers: 3.0,
            fanout: Fanout {
                free: 10.0,
                per_peer: 0.1,
            },
            hidden: 0.0,
            factors: Vec::new(),
            shared: 2,
            source: String::new(),
        };
        assert_eq!(level.rate(3.0), 10e9);
        let many = level.rate(20.0);
        assert!((many - 20e9 * 20.0 / 23.0 / 2.0).abs() < 1.0, "{many}");
        assert!((level.per_message() * 20e9 - 4096.0).abs() < 1e-6);
    }

    #[test]
    fn factors_are_met_and_interpolated() {
        let of = |peers, kib, by| Factor {
            peers,
            kib,
            by,
            again: None,
        };
        let all = [
            of(4.0, 64.0, 1.0),
            of(1.0, 1.0, 1.0),
            of(1.0, 16.0, 4.0),
            of(4.0, 1.0, 9.0),
        ];
        let near = |peers, kib, by: f64| {
            let found = factor(&all, peers, kib);
            assert!((found / by - 1.0).abs() < 1e-9, "{peers} {kib}: {found}");
        };
        for Factor { peers, kib, by, .. } in all {
            near(peers, kib, by);
        }
        near(1.0, 4.0, 2.0);
        near(4.0, 8.0, 3.0);
        near(2.0, 1.0, 3.0);
        // Beyond what was measured.
        near(0.5, 0.1, 1.0);
        near(64.0, 1e6, 1.0);
        assert_eq!(factor(&[], 3.0, 1.0), 1.0);
    }
}
