//! Threads of a CPU or of a simulator.

use crate::failure::Result;
use crate::targets::Asked;
use clap::Args;
use moesaic::kernel::SimArch;
use moesaic::{EngineOptions, Target};

/// The options `--threads N` and `--pin`.
#[derive(Args, Clone, Copy, Debug)]
pub struct ThreadArgs {
    /// Threads of the CPU, or of a GPU's simulator; one per core if not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// Pin each CPU thread to one processor
    #[arg(long)]
    pin: bool,
}

impl ThreadArgs {
    /// Refuses options that the target has no use for.
    pub fn check(self, asked: &Asked<'_>) -> Result {
        let own_threads = match asked.target {
            Target::Cpu(_) | Target::Sim(SimArch::Cuda(_) | SimArch::Rocm(_)) => true,
            Target::Cuda(_) | Target::Rocm(_) | Target::Sim(SimArch::Cpu(_)) => false,
        };
        if self.threads.is_some() && !own_threads {
            return Err(asked
                .idle(
                    "--threads",
                    "CPUs and simulators of GPUs have threads to count",
                )
                .hint("leave it out"));
        }
        if self.pin && !matches!(asked.target, Target::Cpu(_)) {
            return Err(asked
                .idle("--pin", "it keeps the threads of a CPU in their places")
                .hint("leave it out, or take --target cpu"));
        }
        Ok(())
    }

    /// Returns the number of threads, if it was given.
    pub fn count(self) -> Option<usize> {
        self.threads.map(usize::from)
    }

    /// Adds the threads to an engine's options.
    pub fn of(self, options: EngineOptions) -> EngineOptions {
        EngineOptions {
            threads: self.count(),
            pinned: self.pin,
            ..options
        }
    }
}
