//! Prints digests of kernel text for random layers, forward and in training. Two commits that print
//! the same lines emit the same text.
//!
//! `texts cpu LAYERS` takes the experts' GEMMs for every CPU, each in the tiling that the plan
//! chooses and in some that no plan has; `texts all LAYERS` takes every kernel for every target. A
//! line is `NUMBER TARGET NAME TILING TEXT CODE`: CODE is the digest without comments and blanks.
//! With a number as third argument, the program writes that one text to the file of the fourth.

use moesaic_kernel::Target;
use moesaic_plan::{KernelPlan, PlanOptions, Training, plan};
use moesaic_spec::testing::sample;
use std::collections::HashSet;
use std::error::Error;
use std::hash::{DefaultHasher, Hash, Hasher};

const CPUS: [&str; 7] = [
    "cpu:portable",
    "cpu:avx2",
    "cpu:avx512",
    "cpu:avx512bf16",
    "cpu:amx",
    "cpu:neon",
    "cpu:neonbf16",
];

const GPUS: [&str; 10] = [
    "cuda:sm_75",
    "cuda:sm_80",
    "cuda:sm_90a",
    "cuda:sm_100a",
    "rocm:gfx90a",
    "rocm:gfx942",
    "rocm:gfx950",
    "rocm:gfx1100",
    "sim:gfx942",
    "sim:gfx1100",
];

/// Tilings that no plan has. The text does not depend on whether a plan would choose them.
const TILINGS: [&str; 8] = [
    "planned", "shallow", "deep", "packing", "decode", "narrow", "wide", "gather",
];

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [what, layers, one @ ..] = &arguments[..] else {
        return Err("texts cpu|all LAYERS [NUMBER FILE]".into());
    };
    let one = match one {
        [number, file] => Some((number.parse::<usize>()?, file)),
        _ => None,
    };
    let (mut number, mut seen) = (0, HashSet::new());
    for seed in 0..layers.parse()? {
        for (target, tiling, kernel) in texts(seed, what == "all")? {
            if !seen.insert(digest(&format!("{target} {:?}", kernel.op))) {
                continue;
            }
            number += 1;
            if one.is_some_and(|(wanted, _)| wanted != number) {
                continue;
            }
            let text = moesaic_emit::emit(&kernel, target)?.text;
            if let Some((_, file)) = one {
                std::fs::write(file, &text)?;
            }
            let (whole, code) = (digest(&text), digest(&code(&text)));
            println!(
                "{number} {target} {} {tiling} {whole:016x} {code:016x}",
                kernel.name
            );
        }
    }
    Ok(())
}

/// A kernel for a target, tiled as a name says.
type Tiled = (Target, &'static str, KernelPlan);

/// Returns the kernels of a layer with their targets.
fn texts(seed: u64, all: bool) -> Result<Vec<Tiled>, Box<dyn Error>> {
    let mut list = Vec::new();
    let gpus = if all { &GPUS[..] } else { &[] };
    for target in CPUS.iter().chain(gpus) {
        let target: Target = target.parse()?;
        let spec = sample(seed);
        let training = PlanOptions::training(Training::default());
        for options in [PlanOptions::default(), training] {
            let kernels = plan(&spec, target, &options)?.kernels.into_iter();
            for kernel in kernels.filter(|kernel| all || kernel.op.gemm().is_some()) {
                let tilings = if all { &TILINGS[..1] } else { &TILINGS[..] };
                list.extend(
                    tilings
                        .iter()
                        .map(|name| (target, *name, tiled(&kernel, name))),
                );
            }
        }
    }
    Ok(list)
}

fn tiled(kernel: &KernelPlan, tiling: &str) -> KernelPlan {
    let mut kernel = kernel.clone();
    if let Some(config) = kernel.op.gemm_mut() {
        let columns = config.thread_columns;
        match (tiling, config.family.cpu_mut()) {
            ("packing", Some(cpu)) => cpu.packed = !cpu.packed,
            ("gather", Some(cpu)) => cpu.gather = !cpu.gather,
            ("decode", Some(cpu)) => {
                cpu.decode_tokens = if cpu.decode_tokens == 0 { 16 } else { 0 };
                cpu.decode_columns = columns;
            }
            ("shallow", _) => config.tile_depth = 64,
            ("deep", _) => config.tile_depth = 4096,
            ("narrow", _) => config.thread_columns = 8,
            ("wide", _) => config.thread_columns = 32,
            _ => {}
        }
        kernel.entries = kernel.op.entries();
    }
    kernel
}

/// Returns the text without comments and blanks.
fn code(text: &str) -> String {
    let lines = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    lines.flat_map(str::split_whitespace).collect()
}

fn digest(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}
