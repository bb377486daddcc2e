//! The figures that a machine may have.

use super::{Compute, FP8, Machine};
use crate::exchange::MOST_LEVELS;
use crate::read::ReadError;

/// The names of all rates: types that GEMMs multiply in.
const RATES: [&str; 4] = ["f32", "f16", "bf16", FP8];

impl Machine {
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
            let below = self.units()[at.saturating_sub(1)];
            if level.shared == 0 || level.shared > below {
                let key = format!("{}.shared", level.name);
                let possible = "a link is of at least one rank, and at most of those of a unit";
                return wrong(key, level.shared.to_string(), possible);
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
            let possible = "between 0.25 and 4: at these bounds it says nothing about the algorithm, \
                            because the machine was busy or the steps were too short; measure \
                            again, or remove every `[[all_to_all]]`";
            return wrong(key, all_to_all.by.to_string(), possible);
        }
        let shared = self.compute.ranks_per_processor;
        if !(shared.is_finite() && shared >= 1.0) {
            let key = "compute.ranks_per_processor".to_string();
            return wrong(key, shared.to_string(), "1, or more where ranks share one");
        }
        if self.error.ranks == 0 {
            let possible = "a band holds up to 1 rank or more";
            return wrong("error.ranks".to_string(), "0".to_string(), possible);
        }
        if let Some((key, value, possible)) = self.compute.wrong_rate() {
            return wrong(key, value, possible);
        }
        // NaN and infinity are numbers in TOML, and would silently poison every prediction; so would
        // figures whose products overflow.
        for (key, value, positive) in self.figures() {
            let (possible, fits) = if positive {
                ("must be from 1e-6 to 1e12", (1e-6..=1e12).contains(&value))
            } else {
                ("must be from 0 to 1e12", (0.0..=1e12).contains(&value))
            };
            if !fits {
                return wrong(key, value.to_string(), possible);
            }
        }
        Ok(())
    }

    /// Returns every figure, and whether it must be positive.
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
        list.extend(
            self.model
                .iter()
                .map(|model| ("model.by".to_string(), model.by, true)),
        );
        list.push((
            "compute.multiprocessors beyond overlap.multiprocessors".to_string(),
            processors as f64,
            true,
        ));
        let rates = compute.gemm_tflops.iter();
        list.extend(rates.map(|(name, rate)| (format!("gemm_tflops.{name}"), *rate, true)));
        let peaks = compute.peak_tflops.iter();
        list.extend(peaks.map(|(name, peak)| (format!("peak_tflops.{name}"), *peak, true)));
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
}

impl Compute {
    /// Returns a rate that no kernel has: its key, its value, and the possible ones.
    fn wrong_rate(&self) -> Option<(String, String, &'static str)> {
        const POSSIBLE: &str = "rates are of f32, f16, bf16 and fp8, and one of them is there";
        if self.gemm_tflops.is_empty() {
            return Some((
                "compute.gemm_tflops".to_string(),
                "{}".to_string(),
                POSSIBLE,
            ));
        }
        let tables = [
            ("gemm_tflops", &self.gemm_tflops),
            ("peak_tflops", &self.peak_tflops),
        ];
        tables.into_iter().find_map(|(table, rates)| {
            let unknown = |name: &&String| !RATES.contains(&name.as_str());
            let (name, rate) = rates.iter().find(|(name, _)| unknown(name))?;
            Some((
                format!("compute.{table}.{name}"),
                rate.to_string(),
                POSSIBLE,
            ))
        })
    }
}
