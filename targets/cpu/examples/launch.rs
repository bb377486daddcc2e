//! Prints this machine's limits, the cost of a launch, and how evenly blocks of
//! very different cost are spread, over shared threads and over the device's
//! own: `cargo run --release -p moesaic-cpu --example launch`.

use moesaic_cpu::{CpuCompiler, CpuDevice, host_isa, limits};
use moesaic_kernel::{Entry, KernelSource, Language, Launch, Param, Size, Stem, Target};
use moesaic_target::{Arg, CompileOptions, Compiler, Device, LaunchDims, Module};
use std::error::Error;
use std::time::Instant;

/// Block b spins for `base + step * b` turns: the last blocks cost the most
/// with a positive step, the first ones with a negative one.
const SPIN: &str = "
typedef __INT64_TYPE__ i64;
void spin(void *const *args, i64 first, i64 last, i64 grid_x) {
  i64 base = *(i64 *)args[0], step = *(i64 *)args[1];
  (void)grid_x;
  for (i64 b = first; b < last; ++b)
    for (i64 i = 0; i < base + step * b; ++i) __asm__ volatile(\"\" : \"+r\"(i));
}
";

fn main() -> Result<(), Box<dyn Error>> {
    let compiler = CpuCompiler::find(None)?;
    let device = CpuDevice::new();
    println!("{:?}", device.info());
    let started = Instant::now();
    println!("{:?}", limits::measure(&compiler, &device, host_isa())?);
    println!("measured in {:?}", started.elapsed());

    let entry = spin_entry();
    let artifact = compiler.compile(&spin_source(&entry), &CompileOptions::default())?;
    let module = device.load(&artifact, std::slice::from_ref(&entry))?;
    let alone = CpuDevice::with_threads(1)?.load(&artifact, std::slice::from_ref(&entry))?;
    let own = CpuDevice::with_threads(device.threads())?.load(&artifact, &[entry])?;
    println!("best, us                1 thread     shared        own   speedup");
    for (what, blocks, base, step) in [
        ("1 empty block", 1, 0, 0),
        ("2 empty blocks", 2, 0, 0),
        ("64 empty blocks", 64, 0, 0),
        ("4096 empty blocks", 4096, 0, 0),
        ("16 blocks, even", 16, 20_000, 0),
        ("256 blocks, even", 256, 20_000, 0),
        ("256 blocks, rising", 256, 0, 200),
        ("256 blocks, falling", 256, 51_200, -200),
    ] {
        let args = [Arg::I64(base), Arg::I64(step)];
        let one = time(&*alone, blocks, &args)?;
        let all = time(&*module, blocks, &args)?;
        let pool = time(&*own, blocks, &args)?;
        println!(
            "{what:20} {one:11.2} {all:10.2} {pool:10.2}     x{:.2}",
            one / pool
        );
    }
    Ok(())
}

fn spin_entry() -> Entry {
    let grid = [Size::Tokens, Size::Const(1)];
    Entry {
        symbol: "spin".to_string(),
        summary: "Burns time.".to_string(),
        params: vec![Param::i64("base"), Param::i64("step")],
        launch: Launch {
            grid,
            threads: 1,
            shared_bytes: 0,
            cluster: 1,
            dependent: false,
        },
    }
}

fn spin_source(entry: &Entry) -> KernelSource {
    KernelSource {
        stem: Stem::GroupedGemm,
        name: "spin".to_string(),
        target: Target::Cpu(host_isa()),
        language: Language::C,
        text: SPIN.to_string(),
        config: String::new(),
        entries: vec![entry.clone()],
    }
}

/// Returns the time of the median launch in microseconds.
fn time(module: &dyn Module, blocks: u64, args: &[Arg]) -> Result<f64, Box<dyn Error>> {
    let dims = LaunchDims {
        grid: [blocks, 1],
        threads: 1,
        shared_bytes: 0,
        cluster: 1,
    };
    let mut times = Vec::new();
    for _ in 0..200 {
        let started = Instant::now();
        // SAFETY: spin takes two integers and touches no memory.
        unsafe { module.launch("spin", dims, args)? };
        times.push(started.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
