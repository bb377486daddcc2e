//! The output of the bench; benches/peers/plot.py reads it.

use crate::pass::Pass;
use crate::peer::Variant;
use crate::shapes::Shape;
use crate::timing::Times;
use crate::work::Work;
use moesaic::reference::Skew;
use moesaic::{DType, Engine};
use std::collections::BTreeMap;

pub const LEGEND: &str = "\
# ms: ours, the median; % of roofline: the roofline of the work on this machine over our time, where the roofline is the longer of
# arithmetic at the rate of multiply-adds alone and memory at the rate of reading alone (columns `peak` and `GB/s`), each for 20 ms
# before and 20 ms after our turn, sustained rates, not peaks of a moment; median of pairs. Right of the bar: a peer's time over ours, likewise;
# behind it the fastest variant of each peer on this line, which is what a claim goes by.
# Memory's rate is that of more than the caches hold; the few experts of one token may fit in them, and do better than it.
";

/// Date and machine.
pub fn machine() -> String {
    let cpu = Engine::cpu().map_or("no C compiler".to_string(), |engine| {
        format!("{}, {}", engine.device_info().name, engine.target())
    });
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or("unknown").to_string();
    format!("{}, {cpu}, load {load} at the start", date())
}

/// Year, month and day of now (UTC), from days since 1970 (the proleptic
/// Gregorian calendar in eras of 400 years that begin in March).
fn date() -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let days = since.map_or(0, |time| time.as_secs() / 86400) + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}

/// Says whose the lines below are.
pub fn head(shape: &Shape, dtype: DType, threads: usize, product: Option<f64>) {
    let scaled = match shape.scaled {
        "" => String::new(),
        how => format!(" ({how})"),
    };
    println!(
        "{} {dtype}, {threads} threads: {} x {}, {} experts, top {}{scaled}",
        shape.name, shape.model_dim, shape.hidden_dim, shape.experts, shape.top_k
    );
    if let Some(rate) = product {
        println!("torch's product of 4096: {rate:.0} GFLOP/s");
    }
}

/// One layer's lines.
pub struct Table<'a> {
    variants: &'a [Variant],
}

impl Table<'_> {
    pub fn new(variants: &[Variant]) -> Table<'_> {
        Table { variants }
    }

    pub fn titles(&self) {
        let titles = self
            .variants
            .iter()
            .map(|variant| format!(" {:>14}", variant.title));
        println!(
            "routing   tokens     pass         ms   GFLOP/s     peak   GB/s  % of roofline |{} | fastest",
            titles.collect::<String>()
        );
    }

    pub fn row(&self, skew: Skew, tokens: usize, pass: Pass, work: &Work, times: &Times) {
        let seconds = times.here.as_secs_f64();
        let ratio = |ratio: &Option<f64>| match ratio {
            Some(ratio) => format!(" {ratio:>14.2}"),
            None => format!(" {:>14}", "-"),
        };
        let ratios: String = times.ratios.iter().map(ratio).collect();
        let (skew, pass) = (skew.to_string(), pass.to_string());
        println!(
            "{skew:8} {tokens:7} {pass:>8} {:10.3} {:9.1} {:8.0} {:6.1}  {:13.0} |{ratios} | {}",
            seconds * 1e3,
            work.flops / seconds / 1e9,
            times.limits.gflops,
            times.limits.gbps,
            100.0 * times.of_roofline,
            self.fastest(times),
        );
    }

    /// The quickest way of each peer, by name, and its ratio.
    fn fastest(&self, times: &Times) -> String {
        let mut best: BTreeMap<usize, (&str, f64)> = BTreeMap::new();
        for (variant, ratio) in self.variants.iter().zip(&times.ratios) {
            let Some(ratio) = *ratio else { continue };
            let held = best.entry(variant.peer).or_insert((&variant.title, ratio));
            if ratio < held.1 {
                *held = (&variant.title, ratio);
            }
        }
        let words = best
            .values()
            .map(|(title, ratio)| format!("{title} {ratio:.2}"));
        words.collect::<Vec<_>>().join(", ")
    }
}
