//! Measurements of a machine, as a file that the planner reads.

use crate::fit::{Fit, Point, fit};
use crate::machine::{AllToAllFactor, Factor, Machine, factor};
use crate::read::{self, ReadError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Measurements of a machine. Each replaces the machine's figure; figures that were not measured
/// stay.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// The machine: the name of its file, or a name of its owner's choice.
    pub machine: String,
    /// The date, as year-month-day.
    pub date: String,
    /// The programs that measured.
    pub source: String,
    /// The ranks of the largest measurement.
    pub ranks: usize,
    /// Measurements of exchanges, by level.
    #[doc(hidden)]
    #[serde(default, rename = "level", skip_serializing_if = "Vec::is_empty")]
    pub levels: Vec<LevelFit>,
    /// Measurements of processors.
    #[doc(hidden)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute: Option<MeasuredProcessor>,
    /// The largest error of the fits: the uncertainty of predictions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub band: Option<f64>,
    /// Measurements of steps, by all-to-all algorithm: see [`Machine::all_to_all_factors`].
    #[doc(hidden)]
    #[serde(default, rename = "all_to_all", skip_serializing_if = "Vec::is_empty")]
    pub all_to_all_factors: Vec<AllToAllFactor>,
}

/// The measured figures of a level's links.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LevelFit {
    /// The level's name in the machine.
    pub name: String,
    /// The fixed time of an exchange in microseconds.
    pub alpha_us: f64,
    /// The bandwidth of a link in GB/s, in each direction.
    pub bandwidth_gbs: f64,
    /// The size in KiB of a message that reaches half of that bandwidth.
    #[serde(default)]
    pub half_size_kib: f64,
    /// See [`Level::hidden`](crate::Level::hidden).
    #[serde(default)]
    pub hidden: f64,
    /// See [`Level::factors`](crate::Level::factors).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub factors: Vec<Factor>,
}

/// The measured figures of a rank's processor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredProcessor {
    /// The memory traffic in GB/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_gbs: Option<f64>,
    /// The rates of large GEMMs in TFLOP/s, by element type.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gemm_tflops: BTreeMap<String, f64>,
    /// The fixed time of a launch in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launch_us: Option<f64>,
}

/// A timed exchange over one level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timed {
    /// The messages that a rank sends.
    pub messages: f64,
    /// The bytes of all of them.
    pub bytes: f64,
    /// The seconds of the exchange.
    pub seconds: f64,
    /// The seconds of an exchange right after another, if that was timed.
    pub again: Option<f64>,
}

impl Timed {
    /// Returns the time among other exchanges. An idle link is ahead of its rate by some bytes,
    /// so a single exchange may look faster than a sequence.
    fn sustained(&self) -> f64 {
        self.seconds.max(self.again.unwrap_or(0.0))
    }
}

impl LevelFit {
    /// Fits the figures of a level to exchanges over it. Returns them, and the error before its
    /// factors are applied. `shared` ranks shared a link and used it at the same time. The fit
    /// needs several sizes and several numbers of peers; with a single number of peers everything
    /// independent of size becomes fixed time.
    pub fn of(name: &str, shared: usize, timed: &[Timed]) -> (LevelFit, Fit) {
        let point = |one: &Timed| Point {
            terms: vec![one.messages, one.bytes],
            measured: one.seconds,
        };
        let points: Vec<Point> = timed.iter().map(point).collect();
        // With one number of peers, the time per message and the fixed time cannot be told apart.
        let alike = timed
            .windows(2)
            .all(|pair| pair[0].messages == pair[1].messages);
        let model = |c: &[f64], terms: &[f64]| {
            let each = if alike { 0.0 } else { c[2] };
            c[0] + c[1] * terms[1] + each * terms[0]
        };
        let least = timed
            .iter()
            .map(|one| one.seconds)
            .fold(f64::INFINITY, f64::min);
        // Start near the data: the fastest exchange bounds the fixed time, the best rate the
        // bandwidth.
        let least = least.min(1.0);
        let most = timed
            .iter()
            .map(|one| one.bytes / one.seconds)
            .fold(1.0, f64::max);
        let found = fit(&[least / 2.0, 1.0 / most, least / 20.0], &points, model);
        let each = if alike { 0.0 } else { found.constants[2] };
        let level = LevelFit {
            name: name.to_string(),
            alpha_us: found.constants[0] * 1e6,
            bandwidth_gbs: 1e-9 / found.constants[1] * shared as f64,
            half_size_kib: each / found.constants[1] / 1024.0,
            hidden: hidden(timed, [found.constants[0], each, found.constants[1]]),
            // The factors absorb what the three constants miss, so measured exchanges are
            // reproduced exactly.
            factors: timed
                .iter()
                .map(|one| Factor {
                    peers: one.messages,
                    kib: one.bytes / one.messages / 1024.0,
                    by: one.sustained() / model(&found.constants, &point(one).terms),
                    again: one.again.map(|seconds| seconds / one.sustained()),
                })
                .collect(),
        };
        (level, found)
    }

    /// Returns the relative error of exchange `at` where it is predicted from all others.
    pub fn without(&self, at: usize) -> f64 {
        let mut others = self.factors.clone();
        // Leave-one-out: the error of a prediction that has not seen the measurement.
        let own = others.remove(at);
        factor(&others, own.peers, own.kib) / own.by - 1.0
    }
}

/// Returns the part of fixed time and per-message time that back-to-back exchanges hide behind
/// transfers: the least squares of the relative error. A single exchange may be short because its
/// link was ahead of its rate, so at least the time of its bytes is assumed.
fn hidden(timed: &[Timed], [fixed, message, byte]: [f64; 3]) -> f64 {
    let (mut over, mut under) = (0.0, 0.0);
    for one in timed {
        let Some(again) = one.again else {
            continue;
        };
        let (still, moved) = (fixed + message * one.messages, byte * one.bytes);
        // No more can hide than the shorter of the two.
        let most = still.min(moved) / again;
        over += most * ((still + moved).max(one.seconds) / again - 1.0);
        under += most * most;
    }
    if under > 0.0 {
        (over / under).clamp(0.0, 1.0)
    } else {
        0.0
    }
}

impl Calibration {
    /// Reads a file.
    ///
    /// # Errors
    /// [`ReadError`] names the key and, for a misspelled one, the likely key.
    pub fn from_toml(text: &str) -> Result<Calibration, ReadError> {
        read::toml("the calibration", text)
    }

    /// Writes the file, which reads back unchanged.
    pub fn to_toml(&self) -> String {
        let quoted = |text: &str| serde_json::Value::from(text).to_string();
        let mut text = format!(
            "machine = {}\ndate = {}\nsource = {}\nranks = {}\n",
            quoted(&self.machine),
            quoted(&self.date),
            quoted(&self.source),
            self.ranks
        );
        if let Some(band) = self.band {
            text += &format!("band = {band:?}\n");
        }
        for level in &self.levels {
            text += &format!(
                "\n[[level]]\nname = {}\nalpha_us = {:?}\nbandwidth_gbs = {:?}\nhalf_size_kib = {:?}\nhidden = {:?}\n",
                quoted(&level.name),
                level.alpha_us,
                level.bandwidth_gbs,
                level.half_size_kib,
                level.hidden
            );
            for Factor {
                peers,
                kib,
                by,
                again,
            } in &level.factors
            {
                text +=
                    &format!("[[level.factors]]\npeers = {peers:?}\nkib = {kib:?}\nby = {by:?}\n");
                text += &again.map_or_else(String::new, |part| format!("again = {part:?}\n"));
            }
        }
        if let Some(compute) = &self.compute {
            text += "\n[compute]\n";
            for (key, value) in [
                ("memory_gbs", compute.memory_gbs),
                ("launch_us", compute.launch_us),
            ] {
                text += &value.map_or_else(String::new, |value| format!("{key} = {value:?}\n"));
            }
            let rates = compute.gemm_tflops.iter();
            let rates: Vec<String> = rates.map(|(of, rate)| format!("{of} = {rate:?}")).collect();
            if !rates.is_empty() {
                text += &format!("gemm_tflops = {{ {} }}\n", rates.join(", "));
            }
        }
        for own in &self.all_to_all_factors {
            let [name, overlap_by] =
                [own.name.to_string(), own.overlap_by.to_string()].map(|it| quoted(&it));
            let AllToAllFactor {
                overlap_degree,
                message_kib,
                by,
                ..
            } = own;
            text += &format!(
                "\n[[all_to_all]]\nname = {name}\noverlap_by = {overlap_by}\noverlap_degree = {overlap_degree}\n"
            );
            text += &format!("message_kib = {message_kib:?}\nby = {by:?}\n");
        }
        text
    }

    /// Returns the machine with these figures.
    ///
    /// # Errors
    /// [`ReadError`] for a level that the machine does not have, and for impossible figures.
    pub fn apply(&self, mut machine: Machine) -> Result<Machine, ReadError> {
        if self.ranks == 0 {
            return Err(ReadError::Value {
                what: format!("the calibration of {}", self.machine),
                key: "ranks".to_string(),
                value: "0".to_string(),
                possible: "at least the one rank that measured",
            });
        }
        let names: Vec<String> = machine.levels.iter().map(|l| l.name.clone()).collect();
        let said = format!("{} of {}", self.source, self.date);
        for fit in &self.levels {
            let own = machine
                .levels
                .iter_mut()
                .find(|level| level.name == fit.name);
            let level = own.ok_or_else(|| {
                let meant = read::closest(&fit.name, names.iter().map(String::as_str));
                ReadError::Other(format!(
                    "the calibration has a level `{}`; {} has {}{}",
                    fit.name,
                    machine.name,
                    names.join(", "),
                    meant.map_or_else(String::new, |meant| format!("; did you mean `{meant}`?"))
                ))
            })?;
            level.alpha_us = fit.alpha_us;
            level.bandwidth_gbs = fit.bandwidth_gbs;
            level.half_size_kib = fit.half_size_kib;
            level.hidden = fit.hidden;
            level.factors.clone_from(&fit.factors);
            level.source.clone_from(&said);
        }
        let same = |old: &AllToAllFactor, own: &AllToAllFactor| {
            (old.name, old.overlap_by) == (own.name, own.overlap_by)
        };
        machine
            .all_to_all_factors
            .retain(|old| !self.all_to_all_factors.iter().any(|own| same(old, own)));
        machine.all_to_all_factors.extend(&self.all_to_all_factors);
        if let Some(measured) = &self.compute {
            let compute = &mut machine.compute;
            compute.memory_gbs = measured.memory_gbs.unwrap_or(compute.memory_gbs);
            compute.launch_us = measured.launch_us.unwrap_or(compute.launch_us);
            compute.gemm_tflops.extend(measured.gemm_tflops.clone());
            compute.source = format!("{said}; what is not there: {}", compute.source);
        }
        if let Some(band) = self.band {
            machine.error = crate::Band {
                band,
                ranks: self.ranks,
                source: said,
            };
        }
        machine.check()?;
        Ok(machine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published;
    use moesaic_plan::{AllToAll, OverlapBy};

    fn sample() -> Calibration {
        let of = |overlap_by, overlap_degree, message_kib, by| AllToAllFactor {
            name: AllToAll::Linear,
            overlap_by,
            overlap_degree,
            message_kib,
            by,
        };
        Calibration {
            machine: "h800".to_string(),
            date: "2026-11-24".to_string(),
            source: "a \"bench\"".to_string(),
            ranks: 16,
            levels: vec![LevelFit {
                name: "ib".to_string(),
                alpha_us: 50.0,
                bandwidth_gbs: 1e-3,
                half_size_kib: 8.0,
                hidden: 0.5,
                factors: vec![
                    Factor {
                        peers: 1.0,
                        kib: 0.5,
                        by: 1.25,
                        again: Some(0.5),
                    };
                    2
                ],
            }],
            compute: Some(MeasuredProcessor {
                memory_gbs: Some(2000.0),
                gemm_tflops: BTreeMap::from([("bf16".to_string(), 500.0)]),
                launch_us: None,
            }),
            band: Some(0.07),
            all_to_all_factors: vec![
                of(OverlapBy::Rows, 1, 64.0, 1.25),
                of(OverlapBy::Rows, 1, 256.0, 0.8),
                of(OverlapBy::Peers, 4, 64.0, 2.0),
                of(OverlapBy::Peers, 16, 64.0, 0.5),
            ],
        }
    }

    #[test]
    fn a_calibration_reads_back_and_replaces_what_it_has() {
        let own = sample();
        assert_eq!(Calibration::from_toml(&own.to_toml()).unwrap(), own);
        let machine = own.apply(published("h800").unwrap()).unwrap();
        assert_eq!(machine.levels[1].alpha_us, 50.0);
        let near = |all_to_all, (overlap_by, overlap_degree), kib: f64, by: f64| {
            let found = machine.all_to_all(all_to_all, overlap_by, overlap_degree, kib * 1024.0);
            assert!(
                (found - by).abs() < 1e-9,
                "{all_to_all} {overlap_degree} {kib}: {found}"
            );
        };
        for (kib, by) in [
            (1.0, 1.25),
            (64.0, 1.25),
            (128.0, 1.0),
            (256.0, 0.8),
            (1e6, 0.8),
        ] {
            near(AllToAll::Linear, (OverlapBy::Rows, 1), kib, by);
            near(AllToAll::Linear, (OverlapBy::Rows, 8), kib, by);
        }
        for (overlap_degree, by) in [(2, 2.0), (4, 2.0), (8, 1.0), (16, 0.5), (64, 0.5)] {
            near(
                AllToAll::Linear,
                (OverlapBy::Peers, overlap_degree),
                64.0,
                by,
            );
        }
        near(AllToAll::Dedup, (OverlapBy::Rows, 1), 1e3, 1.0);
        assert_eq!(machine.levels[0], published("h800").unwrap().levels[0]);
        assert_eq!(machine.compute.gemm_tflops["bf16"], 500.0);
        assert_eq!((machine.error.band, machine.error.ranks), (0.07, 16));
    }

    #[test]
    fn figures_of_a_level_are_found_again() {
        let time = |messages: f64, bytes: f64| Timed {
            messages,
            bytes,
            seconds: 90e-6 + messages * 0.5e-6 + bytes / 45e9,
            again: Some((90e-6 + messages * 0.5e-6).max(bytes / 45e9)),
        };
        let sizes = [1e3, 1e5, 1e6, 1e7, 1e8];
        let peers = [8.0, 56.0, 248.0];
        let all = peers
            .iter()
            .flat_map(|n| sizes.map(|bytes| time(*n, bytes)));
        let (level, found) = LevelFit::of("ib", 1, &all.collect::<Vec<_>>());
        assert!(found.worst < 0.01, "{level:?} {found:?}");
        assert!((level.alpha_us / 90.0 - 1.0).abs() < 0.02, "{level:?}");
        assert!((level.bandwidth_gbs / 45.0 - 1.0).abs() < 0.02, "{level:?}");
        assert!(
            (level.half_size_kib * 1024.0 / 22500.0 - 1.0).abs() < 0.05,
            "{level:?}"
        );
        assert!((level.hidden - 1.0).abs() < 0.02, "{level:?}");
        assert!((level.factors[3].by - 1.0).abs() < 0.01, "{level:?}");
        assert!(level.without(7).abs() < 0.01, "{level:?}");
        // Small exchanges end before a link has slowed down to its rate.
        let ahead = peers.map(|n| Timed {
            again: Some(2.0 * time(n, 1e3).seconds),
            ..time(n, 1e3)
        });
        let (level, _) = LevelFit::of("ib", 1, &ahead);
        assert!((level.factors[0].by - 2.0).abs() < 0.01, "{level:?}");
        let (level, found) = LevelFit::of("ib", 4, &sizes.map(|bytes| time(8.0, bytes)));
        assert!(
            found.worst < 0.01 && level.half_size_kib == 0.0,
            "{level:?}"
        );
        assert!((level.alpha_us / 94.0 - 1.0).abs() < 0.02, "{level:?}");
        // Each of the four ranks that share a link had 45 GB/s.
        let link = level.bandwidth_gbs;
        assert!((link / 180.0 - 1.0).abs() < 0.02, "{level:?}");
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let mut own = sample();
        own.levels[0].name = "ibb".to_string();
        let error = own
            .apply(published("h800").unwrap())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("has nvlink, ib; did you mean `ib`?"),
            "{error}"
        );
        let text = sample()
            .to_toml()
            .replace("launch", "x")
            .replace("ranks", "rank");
        let error = Calibration::from_toml(&text).unwrap_err().to_string();
        assert!(error.contains("did you mean `ranks`?"), "{error}");
        own = sample();
        own.levels[0].bandwidth_gbs = 0.0;
        assert!(own.apply(published("h800").unwrap()).is_err());
        own = Calibration {
            ranks: 0,
            ..sample()
        };
        let error = own.apply(published("h800").unwrap()).unwrap_err();
        assert!(error.to_string().contains("ranks = 0; at least"), "{error}");
        // A factor at its bound would rank another algorithm first by chance.
        for by in [4.0, 0.25, 3.999_999_7, 9.0] {
            let mut own = sample();
            own.all_to_all_factors[1].by = by;
            let error = own.apply(published("h800").unwrap()).unwrap_err();
            let parts = [
                "all_to_all.linear.by = ",
                "measure again, or remove every `[[all_to_all]]`",
            ];
            for part in parts {
                assert!(error.to_string().contains(part), "{error}");
            }
        }
    }
}
