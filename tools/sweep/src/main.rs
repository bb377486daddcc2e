//! `cargo xtask sweep`: compiles random layers for every GPU.

use clap::Parser;
use moesaic_kernel::Target;
use moesaic_sweep::Sweep;
use moesaic_target::{CompileError, Compiler};
use moesaic_toolchain::{Registry, ToolchainError, nvrtc, rocm};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Compiles random layers, forward and training, for GPUs: every kernel must
/// compile without spills.
#[derive(Parser)]
struct Arguments {
    /// First seed; the others follow it.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Number of layers.
    #[arg(long, default_value_t = 200)]
    specs: u64,
    /// Targets, such as cuda:sm_90a,rocm:gfx942; every GPU by default.
    #[arg(long, value_delimiter = ',')]
    target: Vec<Target>,
    /// Number of targets that each layer is compiled for, others each time; all
    /// of them by default.
    #[arg(long, value_name = "N")]
    each: Option<usize>,
    /// Number of kernels of each layer, drawn; all of them by default.
    #[arg(long, value_name = "N")]
    kernels: Option<usize>,
    /// Compiles only kernels whose name begins so, such as grouped_gemm.
    #[arg(long, value_name = "NAME", default_value = "")]
    only: String,
    /// Compiles only kernels whose text contains this, such as a change of a
    /// template.
    #[arg(long, value_name = "TEXT", default_value = "")]
    with: String,
    /// Draws layers whose GEMMs need most registers instead.
    #[arg(long)]
    products: bool,
    /// Compiles nothing: prints a line for each kernel with its text's digest,
    /// so that you can compare two commits.
    #[arg(long)]
    list: bool,
    /// Begins no layer after this number of seconds.
    #[arg(long)]
    seconds: Option<u64>,
    /// Number of simultaneous compiles; one per processor by default.
    #[arg(long)]
    threads: Option<usize>,
    /// Also writes the table to this file.
    #[arg(long, value_name = "FILE", conflicts_with = "list")]
    results: Option<PathBuf>,
}

/// A reason that there is no sweep.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error(transparent)]
    Toolchain(#[from] ToolchainError),
    #[error(transparent)]
    Compiler(#[from] CompileError),
    #[error("no compiler here takes `{0}`")]
    Target(Target),
    #[error("no kernel of these layers was compiled: `--only` and `--with` leave none")]
    Nothing,
    #[error("{0}: {1}")]
    File(PathBuf, std::io::Error),
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

/// Runs the sweep; returns true if every kernel compiled.
fn run(arguments: &Arguments) -> Result<bool, Failed> {
    let registry = Registry::open()?;
    let (cuda, rocm) = (nvrtc(&registry)?, rocm(&registry)?);
    let compilers: [&dyn Compiler; 2] = [&cuda, &rocm];
    let all: Vec<Target> = compilers.iter().flat_map(|c| c.targets()).collect();
    let targets = if arguments.target.is_empty() {
        all.clone()
    } else {
        arguments.target.clone()
    };
    if let Some(unknown) = targets.iter().find(|target| !all.contains(target)) {
        return Err(Failed::Target(*unknown));
    }
    let sweep = Sweep {
        seed: arguments.seed,
        specs: arguments.specs,
        draw: if arguments.products {
            moesaic_sweep::products
        } else {
            moesaic_sweep::layer
        },
        each: arguments.each.unwrap_or(targets.len()),
        targets,
        kernels: arguments.kernels,
        only: arguments.only.clone(),
        with: arguments.with.clone(),
        limit: arguments.seconds.map(Duration::from_secs),
        threads: arguments.threads.unwrap_or_else(processors),
    };
    if arguments.list {
        sweep.list(&mut |seed, target, source| {
            println!(
                "{seed} {target} {} {:016x}",
                source.name,
                digest(&source.text)
            );
        });
        return Ok(true);
    }
    let which = if arguments.products {
        "--products "
    } else {
        ""
    };
    let table = sweep.run(&compilers, &mut |failure| println!("{which}{failure}"));
    println!("{table}");
    if let Some(path) = &arguments.results {
        std::fs::write(path, table.to_string()).map_err(|e| Failed::File(path.clone(), e))?;
    }
    if table.kernels() == 0 {
        return Err(Failed::Nothing);
    }
    Ok(table.failures == 0)
}

fn digest(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}
