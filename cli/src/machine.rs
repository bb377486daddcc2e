//! Limits of machines: the roofs of a roofline.

use crate::completed::Completed;
use crate::failure::{Failure, Result};
use crate::suggest::{gpu, plain};
use crate::units;
use moesaic::cpu::{CpuDevice, limits};
use moesaic::kernel::CpuIsa;
use moesaic::plan::{Bound, MemoryLevel, Roofs};
use moesaic::target::Device;
use moesaic::toolchain::{self, Registry};
use moesaic::{DType, Target};
use std::path::Path;

/// The limits of a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct MachineLimits {
    /// The common name of the machine.
    pub name: String,
    /// The source of the numbers.
    pub origin: Origin,
    /// The rate of f32 products by the fastest instructions that kernels use for them, in FLOP/s.
    /// On some GPUs these are three products of tf32 on tensor cores.
    pub f32_flops: f64,
    /// The products that have this rate: `f32`, `f32 as 3 tf32` or `tf32`.
    pub f32_name: &'static str,
    /// The rate of dense tf32 products, in FLOP/s; `None` without hardware for them.
    pub tf32_flops: Option<f64>,
    /// The rate of dense f16 matrix products with f32 accumulation, in FLOP/s; `None` without
    /// hardware for them.
    pub f16_flops: Option<f64>,
    /// The rate of dense bf16 matrix products with f32 accumulation, in FLOP/s; `None` without
    /// hardware for them.
    pub bf16_flops: Option<f64>,
    /// The caches that all cores or units have together, smallest first, then memory.
    pub levels: Vec<MemoryLevel>,
    /// The shortest time of a launch, in seconds.
    pub launch_seconds: f64,
    /// The streaming multiprocessors or compute units of a GPU, the threads of a CPU.
    pub units: Option<u32>,
}

/// The source of a machine's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A measurement on this machine, in this run.
    Measured,
    /// The vendor's data sheet.
    Published,
}

impl Origin {
    /// Returns the origin as one word.
    pub fn name(self) -> &'static str {
        match self {
            Origin::Measured => "measured",
            Origin::Published => "published",
        }
    }
}

/// A row of the table: name, architectures, TFLOP/s in f32, TFLOP/s in dense 16-bit matrix
/// products and in those of tf32, GB/s, the last cache that all units share, and the number of
/// units.
struct Known {
    name: &'static str,
    archs: &'static [&'static str],
    f32: f64,
    half: f64,
    tf32: Option<f64>,
    bandwidth: f64,
    cache: LastCache,
    units: u32,
}

/// The last cache of a GPU: its MB and, if its vendor states them, its GB/s.
struct LastCache {
    megabytes: u64,
    bandwidth: Option<f64>,
}

const fn known(
    name: &'static str,
    archs: &'static [&'static str],
    [f32, half, bandwidth]: [f64; 3],
    [megabytes, units]: [u32; 2],
) -> Known {
    Known {
        name,
        archs,
        f32,
        half,
        tf32: None,
        bandwidth,
        cache: LastCache {
            megabytes: megabytes as u64,
            bandwidth: None,
        },
        units,
    }
}

impl Known {
    /// Returns the row with the rate of its cache.
    const fn cached_at(mut self, bandwidth: f64) -> Known {
        self.cache.bandwidth = Some(bandwidth);
        self
    }

    /// Returns the row with the rate of tf32.
    const fn tf32(mut self, rate: f64) -> Known {
        self.tf32 = Some(rate);
        self
    }
}

/// Limits from the vendors' data sheets: boost clocks, no sparsity, bf16 where bf16 and f16 differ,
/// f32 by MFMA where kernels use it, and one die of MI250X, because HIP shows its two as devices.
/// The first machine of an architecture stands for it. Rates of caches: 2048 and 5120 bytes a clock
/// on V100 and A100 (PMC10448217, table 3), and the 17.2 TB/s that AMD states for MI300X. docs/CLI.md
/// names the sources.
#[rustfmt::skip]
const KNOWN: &[Known] = &[
    known("V100", &["sm_70"], [15.7, 125.0, 900.0], [6, 80]).cached_at(3133.0),
    known("T4", &["sm_75"], [8.1, 65.0, 320.0], [4, 40]),
    known("A100", &["sm_80"], [19.5, 312.0, 2039.0], [40, 108]).cached_at(7219.0).tf32(156.0),
    known("A40", &["sm_86"], [37.4, 149.7, 696.0], [6, 84]).tf32(74.8),
    known("RTX 3090", &["sm_86"], [35.6, 71.0, 936.0], [6, 82]).tf32(35.6),
    known("RTX 4090", &["sm_89"], [82.6, 165.2, 1008.0], [72, 128]).tf32(82.6),
    known("L40S", &["sm_89"], [91.6, 362.0, 864.0], [96, 142]).tf32(183.0),
    known("H100", &["sm_90", "sm_90a"], [67.0, 989.4, 3350.0], [50, 132]).tf32(494.7),
    known("H200", &["sm_90", "sm_90a"], [67.0, 989.4, 4800.0], [50, 132]).tf32(494.7),
    known("B200", &["sm_100", "sm_100a", "sm_100f"], [75.0, 2250.0, 7700.0], [126, 148]).tf32(1125.0),
    known("B300", &["sm_103", "sm_103a"], [75.0, 2250.0, 7700.0], [126, 148]).tf32(1125.0),
    known("RTX 5090", &["sm_120", "sm_120a", "sm_120f"], [104.8, 209.5, 1792.0], [96, 170]).tf32(104.8),
    known("MI100", &["gfx908"], [23.1, 92.3, 1229.0], [8, 120]),
    known("MI250X", &["gfx90a"], [47.9, 191.5, 1638.0], [8, 110]),
    known("MI300X", &["gfx942"], [163.4, 1307.4, 5300.0], [256, 304]).cached_at(17200.0),
    known("MI355X", &["gfx950"], [157.3, 2516.6, 8000.0], [256, 256]),
    known("RX 6900 XT", &["gfx1030"], [23.0, 46.1, 512.0], [128, 80]),
    known("RX 7900 XTX", &["gfx1100"], [61.4, 122.8, 960.0], [96, 96]),
    known("RX 9070 XT", &["gfx1201"], [48.7, 195.0, 640.0], [64, 64]),
];

/// The products of tf32 that stand for one of f32.
const TF32_PRODUCTS: f64 = 3.0;

/// The shortest time of a launch on a GPU, in seconds: an estimate from below for kernels that
/// follow each other in a stream. What an engine measures is 2 to 5 µs.
const GPU_LAUNCH: f64 = 2e-6;

/// The part by which a limit may move in a run of a steady machine.
const STEADY: f64 = 0.1;

/// A limit that moved during a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Moved {
    /// The limit, such as `memory`.
    pub what: String,
    /// The rates at the start and at the end.
    pub rates: [f64; 2],
    /// Whether the rates are FLOP/s, and not bytes per second.
    pub arithmetic: bool,
}

/// The limits of a run, and those of them that moved in it.
#[derive(Clone, Debug, PartialEq)]
pub struct Watched {
    /// The better of both measurements.
    pub machine: MachineLimits,
    pub moved: Vec<Moved>,
}

impl Watched {
    /// Says that the machine was not steady, if it was not.
    pub fn warning(&self) -> Option<String> {
        let each = self.moved.iter().map(|moved| {
            let [from, to] = moved.rates.map(|rate| {
                if moved.arithmetic {
                    units::flop_rate(rate)
                } else {
                    units::byte_rate(rate)
                }
            });
            format!("{} went from {from} to {to}", moved.what)
        });
        let each: Vec<String> = each.collect();
        (!each.is_empty()).then(|| {
            format!(
                "machine was not steady: {}; stop other programs and measure again",
                each.join(", ")
            )
        })
    }
}

/// A time as a share of what the machine allows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Share {
    /// The limits are not known, or nothing was done.
    Unknown,
    /// The roofline over the time, at most 1.
    Of(f64),
    /// The time is below the roofline, which therefore is none.
    Faster,
}

/// The reason for [`Share::Faster`], in words.
pub const FASTER: &str = "faster than the roofline, so there is no share: part of its bytes \
    were in a faster cache, or the limits were measured on a busy machine";

impl Share {
    pub fn new(roofline: Option<f64>, seconds: f64) -> Share {
        match roofline {
            Some(roofline) if roofline > 0.0 && seconds > 0.0 => match roofline / seconds {
                share if share > 1.005 => Share::Faster,
                share => Share::Of(share.min(1.0)),
            },
            _ => Share::Unknown,
        }
    }

    /// Returns the share, if there is one.
    pub fn value(self) -> Option<f64> {
        match self {
            Share::Of(share) => Some(share),
            Share::Unknown | Share::Faster => None,
        }
    }

    /// Formats the share in percent. `faster` needs [`FASTER`] beside it.
    pub fn text(self) -> String {
        match self {
            Share::Unknown => "-".to_string(),
            Share::Of(share) => format!("{:.0}", 100.0 * share),
            Share::Faster => "faster*".to_string(),
        }
    }
}

impl MachineLimits {
    /// Returns the rate that arithmetic on this element type can reach.
    pub fn flops(&self, dtype: DType) -> f64 {
        let own = match dtype {
            DType::F16 => self.f16_flops,
            DType::Bf16 => self.bf16_flops,
            _ => None,
        };
        own.unwrap_or(self.f32_flops)
    }

    /// Returns the machine for a layer whose f32 products may be one of tf32 each.
    #[must_use]
    pub fn with_tf32(self, allowed: bool) -> MachineLimits {
        match self.tf32_flops {
            Some(rate) if allowed && rate > self.f32_flops => MachineLimits {
                f32_flops: rate,
                f32_name: "tf32",
                ..self
            },
            _ => self,
        }
    }

    /// Returns the memory bandwidth, in bytes per second.
    pub fn bytes_per_second(&self) -> f64 {
        let memory = self.levels.last();
        memory
            .and_then(|level| level.bytes_per_second)
            .unwrap_or(f64::INFINITY)
    }

    /// Returns the limits of a launch whose arithmetic is on this element type.
    pub fn roofs(&self, dtype: DType) -> Roofs<'_> {
        Roofs {
            flops_per_second: self.flops(dtype),
            levels: &self.levels,
            launch_seconds: self.launch_seconds,
        }
    }

    /// Names the limit that sets a roofline.
    pub fn bound(&self, bound: Bound) -> &str {
        match bound {
            Bound::Nothing => "nothing",
            Bound::Arithmetic => "arithmetic",
            Bound::Level(level) => &self.levels[level].name,
            Bound::Launch => "launch",
        }
    }

    /// Returns the better of this measurement and a later one, with what moved between them.
    pub fn watched(self, later: &MachineLimits) -> Watched {
        let (mut machine, mut moved) = (self, Vec::new());
        let mut take = |what: &str, own: &mut f64, later: f64, arithmetic| {
            if later.max(*own) > later.min(*own) * (1.0 + STEADY) {
                let (what, rates) = (what.to_string(), [*own, later]);
                moved.push(Moved {
                    what,
                    rates,
                    arithmetic,
                });
            }
            *own = own.max(later);
        };
        take("f32", &mut machine.f32_flops, later.f32_flops, true);
        if let (Some(own), Some(later)) = (&mut machine.bf16_flops, later.bf16_flops) {
            take("bf16", own, later, true);
        }
        for (own, later) in machine.levels.iter_mut().zip(&later.levels) {
            if let (Some(rate), Some(later)) = (&mut own.bytes_per_second, later.bytes_per_second) {
                take(&own.name, rate, later, false);
            }
        }
        Watched { machine, moved }
    }

    /// Returns the rate of 16-bit matrix products and their type, if there is hardware for them.
    pub fn half(&self) -> Option<(f64, &'static str)> {
        let name = match self.f16_flops {
            Some(_) => "16-bit",
            None => "bf16",
        };
        Some((self.bf16_flops?, name))
    }

    /// Returns the published limits of a GPU that runs this target.
    pub fn of_target(target: Target) -> Option<MachineLimits> {
        let arch = target.arch();
        KNOWN
            .iter()
            .find(|known| known.archs.contains(&&*arch))
            .map(published)
    }

    /// Returns the published limits of a device by its driver's name for it, or else by its
    /// architecture.
    pub fn of_device(name: &str, target: Target) -> Option<MachineLimits> {
        let arch = target.arch();
        let mut same = KNOWN.iter().filter(|known| known.archs.contains(&&*arch));
        let by_name = same.find(|known| name.contains(known.name)).map(published);
        by_name.or_else(|| MachineLimits::of_target(target))
    }

    /// Measures the limits of this machine's CPU in half a second, with the instructions that
    /// kernels for `isa` use.
    pub fn measure_cpu(device: &CpuDevice, isa: CpuIsa) -> Result<MachineLimits> {
        let registry = Registry::open().unwrap_or_else(|_| Registry::at(Path::new("")));
        let compiler = toolchain::c(&registry).map_err(|error| Failure::from(&error))?;
        let limits = limits::measure(&compiler, device, isa).map_err(Failure::work)?;
        let caches = limits.caches.iter();
        let caches = caches.map(|cache| (cache.level, cache.bytes, cache.read_gbps));
        Ok(MachineLimits {
            name: device.info().name.clone(),
            origin: Origin::Measured,
            f32_flops: limits.f32_gflops * 1e9,
            f32_name: "f32",
            tf32_flops: None,
            f16_flops: None, // kernels widen f16 to f32
            bf16_flops: limits.bf16_gflops.map(|rate| rate * 1e9),
            levels: MemoryLevel::measured(caches, limits.read_gbps),
            launch_seconds: 0.0, // a small launch runs on the thread that asks for it
            units: u32::try_from(device.threads()).ok(),
        })
    }
}

/// The name of a GPU.
pub const NAME: Completed = Completed(|| {
    let names = KNOWN.iter().map(|known| known.name.to_lowercase());
    names.map(|name| name.replace(' ', "-")).collect()
});

/// Returns the machine that `--machine` names, or fails if it does not run the target.
pub fn required(name: &str, target: Target) -> Result<MachineLimits> {
    let Some(known) = find(name) else {
        let failure = Failure::input(format!(
            "unknown machine `{name}`\nknown machines: {}",
            names(|_| true)
        ));
        let all: Vec<&str> = KNOWN.iter().map(|known| known.name).collect();
        return Err(match gpu(name, &all) {
            Some(near) => failure.hint(format!("did you mean `{near}`?")),
            None => failure,
        });
    };
    if known.runs(target) {
        return Ok(published(known));
    }
    let fitting = match target.hardware() {
        Target::Cpu(_) => "limits of a CPU are measured: leave --machine out".to_string(),
        _ => format!("machines that do: {}", names(|known| known.runs(target))),
    };
    Err(Failure::input(format!(
        "--machine {}: it does not run kernels for `{target}`\n{fitting}",
        known.name
    )))
}

fn find(name: &str) -> Option<&'static Known> {
    KNOWN.iter().find(|known| plain(known.name) == plain(name))
}

fn names(fits: impl Fn(&Known) -> bool) -> String {
    let fitting = KNOWN.iter().filter(|known| fits(known));
    let names: Vec<&str> = fitting.map(|known| known.name).collect();
    names.join(", ")
}

impl Known {
    /// Returns whether binaries for `target` run on this machine.
    fn runs(&self, target: Target) -> bool {
        let hardware = target.hardware();
        let all = Target::all().into_iter();
        let mut own = all.filter(|target| self.archs.contains(&&*target.arch()));
        own.any(|own| match (own, hardware) {
            (Target::Cuda(own), Target::Cuda(asked)) => own.runs(asked),
            (own, asked) => own == asked,
        })
    }
}

fn published(known: &Known) -> MachineLimits {
    let three = known.tf32.map_or(0.0, |rate| rate / TF32_PRODUCTS);
    MachineLimits {
        name: known.name.to_string(),
        origin: Origin::Published,
        f32_flops: known.f32.max(three) * 1e12,
        f32_name: if three > known.f32 {
            "f32 as 3 tf32"
        } else {
            "f32"
        },
        tf32_flops: known.tf32.map(|rate| rate * 1e12),
        f16_flops: Some(known.half * 1e12),
        bf16_flops: Some(known.half * 1e12),
        levels: vec![
            MemoryLevel {
                name: "cache".to_string(),
                capacity: Some(known.cache.megabytes << 20),
                bytes_per_second: known.cache.bandwidth.map(|rate| rate * 1e9),
            },
            MemoryLevel {
                name: "memory".to_string(),
                capacity: None,
                bytes_per_second: Some(known.bandwidth * 1e9),
            },
        ],
        launch_seconds: GPU_LAUNCH,
        units: Some(known.units),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_names_real_architectures() {
        let archs: Vec<String> = Target::all().into_iter().map(Target::arch).collect();
        for known in KNOWN {
            for arch in known.archs {
                assert!(archs.iter().any(|a| a == arch), "{}: {arch}", known.name);
            }
        }
    }

    #[test]
    fn a_machine_is_found_by_name_device_and_target() {
        let target: Target = "cuda:sm_90a".parse().unwrap();
        assert_eq!(MachineLimits::of_target(target).unwrap().name, "H100");
        assert_eq!(
            MachineLimits::of_device("NVIDIA H200", target)
                .unwrap()
                .name,
            "H200"
        );
        assert_eq!(find("rtx-4090").unwrap().name, "RTX 4090");
        assert!(find("abacus").is_none());
    }

    #[test]
    fn a_machine_that_moved_was_not_steady() {
        let early = published(find("A100").unwrap());
        let mut later = early.clone();
        later.f32_flops *= 0.95;
        assert_eq!(early.clone().watched(&later).warning(), None);
        later.levels[1].bytes_per_second = Some(3e12);
        let watched = early.watched(&later);
        assert_eq!(watched.machine.bytes_per_second(), 3e12);
        assert_eq!(watched.machine.f32_flops, 52e12);
        let warning = watched.warning().unwrap();
        assert!(
            warning.contains("not steady: memory went from 2.04 TB/s to 3 TB/s"),
            "{warning}"
        );
    }

    /// Kernels use what is fastest, and no time may be below its roofline.
    #[test]
    fn f32_products_run_on_tensor_cores_where_these_are_faster() {
        let tera = |flops: f64| (flops / 1e11).round() / 10.0;
        let f32 = |name| tera(published(find(name).unwrap()).f32_flops);
        assert_eq!(
            [f32("H100"), f32("A40"), f32("MI250X")],
            [164.9, 37.4, 47.9]
        );
        let tf32 =
            |name, allowed| tera(published(find(name).unwrap()).with_tf32(allowed).f32_flops);
        assert_eq!([tf32("H100", true), tf32("MI300X", true)], [494.7, 163.4]);
        assert_eq!(tf32("H100", false), 164.9);
    }

    #[test]
    fn no_share_is_above_one() {
        assert_eq!(Share::new(Some(1.0), 2.0).text(), "50");
        assert_eq!(Share::new(Some(1.004), 1.0), Share::Of(1.0));
        assert_eq!(Share::new(Some(18.67), 1.0).text(), "faster*");
        assert_eq!(Share::new(Some(18.67), 1.0).value(), None);
        assert_eq!(Share::new(None, 1.0).text(), "-");
    }

    #[test]
    fn a_machine_is_refused_for_targets_that_it_does_not_run() {
        let why = |name, target: &str| required(name, target.parse().unwrap()).unwrap_err().message;
        assert!(required("A40", "cuda:sm_80".parse().unwrap()).is_ok());
        assert!(required("H100", "sim:sm_90a".parse().unwrap()).is_ok());
        assert!(why("A100", "cuda:sm_90a").ends_with("machines that do: H100, H200"));
        assert!(why("H100", "sim:gfx942").ends_with("machines that do: MI300X"));
        assert!(why("H100", "cpu:avx2").ends_with("are measured: leave --machine out"));
    }
}
