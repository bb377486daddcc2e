//! `cargo xtask reprodiff`: holds two builds of the command line against each other.
//!
//! Every layer that the checkout knows, and random ones, go through both: the
//! text of their kernels for every target, and the results of `moesaic run` on
//! every CPU instruction set and simulator that works here, have to be the same
//! bytes.

#[path = "../../../tests/oracle/archive.rs"]
mod archive;
mod compare;
mod comparison;
mod literals;
mod program;
mod specs;
mod table;
mod tensors;

use clap::Parser;
use comparison::Comparison;
use moesaic_kernel::Target;
use safetensors::SafeTensorError;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What is compared.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Only {
    /// The text of kernels.
    Text,
    /// The results of passes.
    Results,
}

/// Holds two builds of moesaic against each other: the text of all kernels and
/// the results of all passes have to be the same bytes.
#[derive(Parser)]
struct Arguments {
    /// The build that is right, a `moesaic` program.
    before: PathBuf,
    /// The build in question.
    after: PathBuf,
    /// The first seed of random layers; the others follow it.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// How many random layers.
    #[arg(long, default_value_t = 40)]
    specs: u64,
    /// Compares one alone; both if not given.
    #[arg(long)]
    only: Option<Only>,
    /// Targets to run on; every CPU and simulator if not given.
    #[arg(long, value_name = "T", value_delimiter = ',')]
    target: Vec<Target>,
    /// On how many CPUs, real or emulated, each layer runs, others for each; on all if not given.
    #[arg(long, value_name = "N")]
    cpus: Option<usize>,
    /// On how many simulated GPUs each layer runs, others for each.
    #[arg(long, value_name = "N", default_value_t = 2)]
    each: usize,
    /// Runs no layer of the first so many, to go on where a comparison had no more time.
    #[arg(long, value_name = "N", default_value_t = 0)]
    skip: usize,
    /// Begins no layer after so many seconds, half of them for text.
    #[arg(long)]
    seconds: Option<u64>,
    /// Stops a command after so many seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    limit: u64,
    /// Stops after so many differences.
    #[arg(long, value_name = "N", default_value_t = 3)]
    differences: usize,
    /// Runs no layer with more bytes of weights; its text is compared.
    #[arg(long, value_name = "BYTES", default_value_t = 16 << 20)]
    largest: usize,
}

/// Why nothing could be compared.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error("{0}: {1}")]
    File(PathBuf, std::io::Error),
    #[error("{0}: {1}")]
    Tensors(PathBuf, SafeTensorError),
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool, Failed> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let root = fs::canonicalize(&root).map_err(|error| Failed::File(root, error))?;
    let cases = specs::cases(&root, arguments.seed, arguments.specs);
    let work = work_folder()?;
    let mut comparison = Comparison::new(arguments, work.path())?;
    let wanted = |only: Only| arguments.only.is_none_or(|it| it == only);
    if wanted(Only::Text) {
        comparison.texts(&cases)?;
    }
    if wanted(Only::Results) {
        comparison.results(&cases)?;
    }
    println!("{} layers\n{}", cases.len(), comparison.table);
    for difference in &comparison.differences {
        println!("DIFFERENT: {difference}");
    }
    let table = &comparison.table;
    let found = wanted(Only::Text) <= table.has(Only::Text)
        && wanted(Only::Results) <= table.has(Only::Results);
    if !found {
        eprintln!("nothing says that they are the same: a kind of comparison is missing");
    }
    let unknown = table.unknown();
    if unknown > 0 {
        eprintln!(
            "{unknown} comparisons were stopped, or there was no time: of these nothing is known"
        );
    }
    Ok(found && comparison.differences.is_empty())
}

/// In memory where the system has such a folder: the programs wait until every
/// file that they write is on the disk.
fn work_folder() -> Result<tempfile::TempDir, Failed> {
    let memory = Path::new("/dev/shm");
    let base = if memory.is_dir() {
        memory.to_path_buf()
    } else {
        std::env::temp_dir()
    };
    tempfile::tempdir_in(&base).map_err(|error| Failed::File(base, error))
}
