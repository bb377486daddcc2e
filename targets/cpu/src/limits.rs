//! Measures the best rates of this machine, with which benches and `inspect`
//! compare kernels.

use crate::{CpuCompiler, CpuDevice};
use moesaic_kernel::{Access, CpuIsa, DType, Entry, Launch, Param, ParamType, Size};
use moesaic_target::{Arg, Buffer, CompileError, Device, DeviceError, LaunchDims, Module};
use std::sync::Arc;
use std::time::{Duration, Instant};

const TEXT: &str = include_str!("limits.c");

/// The best rates of this machine with an instruction set, in a few short runs
/// over all the device's threads.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Threads that took part.
    pub threads: usize,
    /// Rate of f32 multiply-adds, in 1e9 floating point operations per second.
    pub f32_gflops: f64,
    /// Rate of bf16 products with f32 sums, likewise; `None` if the instruction
    /// set has none.
    pub bf16_gflops: Option<f64>,
    /// Rate of memory reads, in 1e9 bytes per second. The memory read is larger
    /// than the caches, so they do not help.
    pub read_gbps: f64,
    /// Rate of memory copies (each byte counts once), in 1e9 bytes per second.
    pub copy_gbps: f64,
    /// Rates of reads from the caches, smallest cache first.
    pub caches: Vec<CacheRate>,
}

/// The caches of one level and the rate of reads from them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CacheRate {
    /// The level: 2 or higher.
    pub level: u8,
    /// Bytes that the caches of the threads hold together.
    pub bytes: u64,
    /// Rate of reads by all threads at once, in 1e9 bytes per second.
    pub read_gbps: f64,
}

/// A reason that the measurement failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LimitsError {
    /// The probe does not compile.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The probe does not run.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Measures the rates of `isa` here for about a second, the compile included,
/// with at most 2 GiB of memory or four last-level caches. An instruction set
/// that this CPU does not run belongs to another machine;
/// [`host_isa`](crate::host_isa) takes its place.
///
/// # Errors
/// The compiler or the device fails.
pub fn measure(
    compiler: &CpuCompiler,
    device: &CpuDevice,
    isa: CpuIsa,
) -> Result<Limits, LimitsError> {
    let probe = Probe::new(compiler, device, isa)?;
    let memory = ProbeMemory::new(device)?;
    Ok(Limits {
        threads: probe.threads,
        f32_gflops: probe.best_rate(probe.f32_rate())?,
        bf16_gflops: probe
            .bf16_rate()
            .map(|rate| probe.best_rate(rate))
            .transpose()?,
        read_gbps: memory.bandwidth(&probe, "limit_read", &probe.results)?,
        copy_gbps: memory.bandwidth(&probe, "limit_copy", &memory.to)?,
        caches: crate::caches::shared_by(device.threads())
            .into_iter()
            .map(|cache| {
                Ok(CacheRate {
                    level: cache.level,
                    bytes: cache.bytes,
                    read_gbps: memory.cached(&probe, cache.bytes)?,
                })
            })
            .collect::<Result<_, DeviceError>>()?,
    })
}

/// Time to measure one limit.
const BUDGET: Duration = Duration::from_millis(40);

/// Least number of bytes that a thread reads or copies, and the unit of its
/// work.
const PIECE: usize = 32 << 20;

/// Bytes that a thread reads from a cache in a launch: long compared with the
/// cost of a launch.
const CACHED: usize = 64 << 20;

/// Largest number of bytes that all threads read or copy, unless a cache is as
/// large.
const MOST: usize = 1 << 30;

/// Returns the bytes that each thread reads or copies: eight times the
/// last-level cache, because each may have one to itself and a cache need not
/// drop the oldest lines. All threads together take at most [`MOST`] or twice
/// that cache, and an eighth of the free memory.
fn share(device: &CpuDevice) -> usize {
    let threads = device.threads();
    let cache = last_level_cache().unwrap_or(0);
    let wanted = (8 * cache * threads).min(MOST.max(2 * cache));
    let most = device
        .free_bytes()
        .map_or(usize::MAX, |free| free as usize / 8);
    (wanted.min(most) / threads)
        .next_multiple_of(PIECE)
        .max(PIECE)
}

/// Returns the bytes of the last-level cache, as Linux reports them.
fn last_level_cache() -> Option<usize> {
    let caches = (0..8).filter_map(|i| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{i}/size");
        let size = std::fs::read_to_string(path).ok()?;
        size.trim().strip_suffix('K')?.parse::<usize>().ok()
    });
    caches.max().map(|kib| kib << 10)
}

/// Returns the number of chains of multiply-adds in `limits.c`.
const fn chains(isa: CpuIsa) -> usize {
    if isa.vector_registers() == 32 { 24 } else { 12 }
}

/// Operations of a product of 16 x 32 by 32 x 16 elements.
const TILE_OPERATIONS: usize = 2 * 16 * 32 * 16;

/// The compiled probes, to measure a rate in turns with something else.
pub struct Probe {
    module: Arc<dyn Module>,
    threads: usize,
    isa: CpuIsa,
    results: Buffer,
}

/// A loop of arithmetic: its symbol, and its operations per round and thread.
#[derive(Clone, Copy)]
struct Rate {
    symbol: &'static str,
    operations: usize,
}

impl Rate {
    /// Rounds of a launch: short compared with disturbances of a host, long
    /// compared with the cost of a launch.
    const ROUNDS: i64 = 200_000;
}

impl Probe {
    /// Compiles the probes. [`host_isa`](crate::host_isa) replaces an
    /// instruction set that this CPU does not run, as in [`measure`].
    ///
    /// # Errors
    /// The compiler or the device fails.
    pub fn new(
        compiler: &CpuCompiler,
        device: &CpuDevice,
        isa: CpuIsa,
    ) -> Result<Probe, LimitsError> {
        let isa = if crate::host_runs(isa) {
            isa
        } else {
            crate::host_isa()
        };
        let entries = entries();
        let symbols: Vec<&str> = entries.iter().map(|entry| entry.symbol.as_str()).collect();
        let artifact = compiler.compile_text("limits", isa, TEXT, &symbols)?;
        let threads = device.threads();
        Ok(Probe {
            module: device.load(&artifact, &entries)?,
            threads,
            isa,
            results: device.alloc(threads * 8)?,
        })
    }

    /// Returns the rate of multiply-adds with f32 sums over about `time`, in
    /// 1e9 operations per second; of bf16 pairs if `dtype` is bf16 and the
    /// instruction set has them. Disturbances count; [`Limits`] hold the best
    /// of a few moments instead.
    ///
    /// # Errors
    /// A launch fails.
    pub fn sustained(&self, dtype: DType, time: Duration) -> Result<f64, LimitsError> {
        let rate = match dtype {
            DType::Bf16 => self.bf16_rate().unwrap_or(self.f32_rate()),
            _ => self.f32_rate(),
        };
        let (launches, seconds) = repeat(time, || self.launch(rate))?;
        Ok(launches * self.giga_operations(rate) / seconds)
    }

    /// Returns the rate of memory reads, made once and over about `time`, in
    /// 1e9 bytes per second. Disturbances count.
    ///
    /// # Errors
    /// A launch fails.
    pub fn sustained_read(&self, memory: &ProbeMemory, time: Duration) -> Result<f64, LimitsError> {
        let args = memory.args(&self.results);
        let (launches, seconds) = repeat(time, || self.run("limit_read", &args))?;
        Ok(launches * memory.giga_bytes(self.threads) / seconds)
    }

    fn f32_rate(&self) -> Rate {
        let symbol = "limit_f32";
        let operations = 2 * self.lanes();
        Rate { symbol, operations }
    }

    fn bf16_rate(&self) -> Option<Rate> {
        let operations = match self.isa {
            isa if isa.bf16_quads() => 8 * self.lanes(),
            CpuIsa::Amx => 4 * TILE_OPERATIONS,
            isa if isa.bf16_pairs() => 4 * self.lanes(),
            _ => return None,
        };
        let symbol = "limit_bf16";
        Some(Rate { symbol, operations })
    }

    /// Returns the 32-bit lanes of all chains.
    fn lanes(&self) -> usize {
        self.isa.vector_bytes() / 4 * chains(self.isa)
    }

    /// Returns the operations of a launch, in 1e9.
    fn giga_operations(&self, rate: Rate) -> f64 {
        (rate.operations * self.threads) as f64 * Rate::ROUNDS as f64 / 1e9
    }

    fn best_rate(&self, rate: Rate) -> Result<f64, DeviceError> {
        let seconds = best(|| self.launch(rate))?;
        Ok(self.giga_operations(rate) / seconds)
    }

    fn launch(&self, rate: Rate) -> Result<(), DeviceError> {
        let args = [Arg::Ptr(self.results.ptr()), Arg::I64(Rate::ROUNDS)];
        self.run(rate.symbol, &args)
    }

    /// Runs one block per thread.
    fn run(&self, symbol: &str, args: &[Arg]) -> Result<(), DeviceError> {
        let dims = LaunchDims {
            grid: [self.threads as u64, 1],
            threads: 1,
            shared_bytes: 0,
            cluster: 1,
        };
        // SAFETY: every entry of limits.c takes these arguments; results
        // holds 8 bytes and the others a share per block.
        unsafe { self.module.launch(symbol, dims, args) }
    }
}

/// The memory that probes read and write to measure its speed: a share per
/// thread of each.
pub struct ProbeMemory {
    share: usize,
    from: Buffer,
    to: Buffer,
}

impl ProbeMemory {
    /// Allocates more than caches hold: see [`measure`].
    ///
    /// # Errors
    /// There is no room.
    pub fn new(device: &CpuDevice) -> Result<ProbeMemory, DeviceError> {
        let share = share(device);
        let all = device.threads() * share;
        let (from, to) = (device.alloc(all)?, device.alloc(all)?);
        // Untouched memory is one shared page of zeros, which would read too
        // fast.
        let ones = vec![1; PIECE];
        for piece in 0..all / PIECE {
            device.upload(&ones, &from, piece * PIECE)?;
        }
        Ok(ProbeMemory { share, from, to })
    }

    fn bandwidth(&self, probe: &Probe, symbol: &str, to: &Buffer) -> Result<f64, DeviceError> {
        let args = self.args(to);
        let seconds = best(|| probe.run(symbol, &args))?;
        Ok(self.giga_bytes(probe.threads) / seconds)
    }

    /// Returns the rate of reads of half of `bytes`, which caches of that size
    /// hold whatever else is in them.
    fn cached(&self, probe: &Probe, bytes: u64) -> Result<f64, DeviceError> {
        let share = (bytes as usize / 2 / probe.threads).min(self.share) & !4095;
        let share = share.max(4096);
        let rounds = (CACHED / share).max(1);
        let args = [
            Arg::Ptr(probe.results.ptr()),
            Arg::Ptr(self.from.ptr()),
            Arg::I64(share as i64),
            Arg::I64(rounds as i64),
        ];
        let seconds = best(|| probe.run("limit_reread", &args))?;
        Ok((probe.threads * share * rounds) as f64 / 1e9 / seconds)
    }

    fn args(&self, to: &Buffer) -> [Arg; 3] {
        [
            Arg::Ptr(to.ptr()),
            Arg::Ptr(self.from.ptr()),
            Arg::I64(self.share as i64),
        ]
    }

    /// Returns the bytes of a launch, in 1e9.
    fn giga_bytes(&self, threads: usize) -> f64 {
        (threads * self.share) as f64 / 1e9
    }
}

/// Launches for about `time`, at least once; returns the launches and their
/// seconds.
fn repeat(
    time: Duration,
    launch: impl Fn() -> Result<(), DeviceError>,
) -> Result<(f64, f64), DeviceError> {
    let begun = Instant::now();
    let mut launches = 0;
    while launches == 0 || begun.elapsed() < time {
        launch()?;
        launches += 1;
    }
    Ok((f64::from(launches), begun.elapsed().as_secs_f64()))
}

/// Returns the seconds of the fastest of several launches.
fn best(launch: impl Fn() -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
    let time = || -> Result<f64, DeviceError> {
        let started = Instant::now();
        launch()?;
        Ok(started.elapsed().as_secs_f64())
    };
    // The first launch wakes threads and touches pages; it does not count.
    time()?;
    let begun = Instant::now();
    let mut best = time()?;
    while begun.elapsed() < BUDGET {
        best = best.min(time()?);
    }
    Ok(best)
}

fn entries() -> Vec<Entry> {
    let pointer = |name: &str| Param {
        name: name.to_string(),
        ty: ParamType::Tensor(DType::I64, Access::ReadWrite),
        shape: String::new(),
    };
    let rate = || vec![pointer("out"), Param::i64("rounds")];
    let stream = || vec![pointer("to"), pointer("from"), Param::i64("bytes")];
    let params = [
        ("limit_f32", rate()),
        ("limit_bf16", rate()),
        ("limit_read", stream()),
        ("limit_copy", stream()),
        (
            "limit_reread",
            [stream(), vec![Param::i64("rounds")]].concat(),
        ),
    ];
    params.map(|(symbol, params)| entry(symbol, params)).into()
}

fn entry(symbol: &str, params: Vec<Param>) -> Entry {
    let grid = [Size::Const(1), Size::Const(1)];
    let launch = Launch {
        grid,
        threads: 1,
        shared_bytes: 0,
        cluster: 1,
        dependent: false,
    };
    let summary = "Measures a limit of the machine.".to_string();
    Entry {
        symbol: symbol.to_string(),
        summary,
        params,
        launch,
    }
}
