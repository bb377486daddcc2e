//! The command line.

use crate::{Result, compile, cuda, device_check, launches, layers, probe, suite};
use clap::{Args, Parser, Subcommand};
use moesaic_probe::kept::Kept;
use moesaic_target::{CompileOptions, Compiler};
use std::path::PathBuf;
use std::process::ExitCode;

/// Checks and measures a GPU; `run.sh` beside it runs everything.
#[derive(Parser)]
pub struct Command {
    #[command(subcommand)]
    step: Step,
}

#[derive(Subcommand)]
enum Step {
    /// Compiles every kernel that the other steps ask for; needs NVRTC, and no GPU.
    Compile(compile::Options),
    /// Fills a folder with the kernels of a pack.
    Unpack {
        /// The pack that `compile` wrote.
        pack: PathBuf,
        /// The folder.
        store: PathBuf,
    },
    /// Says what the device is.
    Facts(Place),
    /// Runs each hardware primitive and compares bits with the tables.
    Probe(probe::Options),
    /// Puts the GPU through everything the device path does.
    Check {
        /// The folder with its kernels.
        #[arg(long)]
        from: PathBuf,
    },
    /// Small layers against the f64 reference, other projects' results and gradients.
    Suite(suite::Options),
    /// The host's time for a call of a layer.
    Launches(launches::Options),
    /// Layers of known models, timed.
    Layers(layers::Options),
}

/// Where layers run and where their kernels come from.
#[derive(Args, Clone)]
pub struct Place {
    /// `cuda`, or a simulator such as `sim:sm_90a`.
    #[arg(long)]
    pub device: String,
    /// The folder that `unpack` filled.
    #[arg(long)]
    pub store: PathBuf,
}

impl Command {
    /// Runs the step.
    ///
    /// # Errors
    /// Why it could not begin.
    pub fn run(self) -> Result<ExitCode> {
        match self.step {
            Step::Compile(options) => compile::compile(&options),
            Step::Unpack { pack, store } => compile::unpack(&pack, store),
            Step::Facts(place) => {
                println!("{}", place.describe()?);
                Ok(ExitCode::SUCCESS)
            }
            Step::Probe(options) => probe::run(&options),
            Step::Check { from } => check(from),
            Step::Suite(options) => suite::run(&options),
            Step::Launches(options) => launches::run(&options),
            Step::Layers(options) => layers::run(&options),
        }
    }
}

fn check(folder: PathBuf) -> Result<ExitCode> {
    let kept = Kept { folder };
    let compile = move |source: &_| Ok(kept.compile(source, &CompileOptions::default())?);
    let backend = cuda::backend(0, Box::new(compile));
    Ok(device_check::main(backend))
}
