//! `moesaic bench`.

mod all_to_all;
mod calibrate;
mod check;
mod lead;
mod measure;
mod report;

use crate::console::Console;
use crate::counts::TokensArgs;
use crate::failure::{Failure, Result};
use crate::form::FormArgs;
use crate::machine::{self, MachineLimits, Watched};
use crate::progress::Progress;
use crate::random;
use crate::spec_source::LayerArgs;
use crate::store::StoreArgs;
use crate::targets::{self, Asked, TargetArgs};
use crate::threads::ThreadArgs;
use crate::timing::TimedCall;
use clap::Args;
use measure::TimedCalls;
use moesaic::cpu::CpuDevice;
use moesaic::reference::Skew;
use moesaic::{Engine, EngineOptions, Layer, Target, Tensors, Training};
use std::path::PathBuf;
use std::time::Duration;

/// The help of `--target`.
const WHERE: &str = "Where to run: auto, cpu, cuda, rocm, or with an architecture, as in cpu:avx2; \
                     no simulator";

/// Time a layer and compare it with the machine's limits
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  moesaic bench --spec layer.toml
  moesaic bench --spec layer.toml --target cuda --tokens 1,64,4096 --json
  moesaic bench --spec layer.toml --training --tokens 4096
  moesaic bench --spec layer.toml --skew zipf:1.2
  moesaic bench --spec layer.toml --ranks 4 --machine mpi-emulated --calibration measured.toml

Weights and tokens are random. The result is checked once against the f64 reference; then each \
launch is timed on its own. Rooflines follow from the plan's arithmetic and traffic and the \
machine's limits: measured before and after the run for a CPU, published for a GPU.")]
#[command(mut_arg("target", |arg| arg.default_value("auto").help(WHERE)))]
pub struct BenchArgs {
    #[command(flatten)]
    layer: LayerArgs,
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    tokens: TokensArgs,
    #[command(flatten)]
    threads: ThreadArgs,
    /// Seconds to repeat each token count for
    #[arg(long, value_name = "S", default_value_t = 0.5)]
    seconds: f64,
    /// The GPU whose published limits are used; with --ranks a machine of `moesaic plan`
    #[arg(long, value_name = "NAME", value_parser = machine::NAME, hide_possible_values = true)]
    machine: Option<String>,
    /// Measure N ranks at once instead, which are threads of this process or the processes of a
    /// launcher: links, GEMMs and other kernels, for `moesaic plan --calibrate`
    #[arg(long, value_name = "N", requires = "calibration", conflicts_with_all = ["skew", "training"], value_parser = clap::value_parser!(u16).range(1..))]
    ranks: Option<u16>,
    /// With --ranks: the file to write
    #[arg(long, value_name = "FILE", requires = "ranks", conflicts_with_all = ["skew", "training"])]
    calibration: Option<PathBuf>,
    /// With --ranks: do not time steps of the layer over all ranks; the file then has no factors of
    /// all-to-all algorithms
    #[arg(long, requires = "ranks", conflicts_with_all = ["skew", "training"])]
    without_steps: bool,
    /// Time a training step: forward and backward
    #[arg(long)]
    training: bool,
    /// Steer tokens to experts: uniform, or zipf:S, which picks the n-th in rank by n^-S and is
    /// also timed against uniform
    #[arg(long, value_name = "SKEW")]
    skew: Option<Skew>,
    #[command(flatten)]
    form: FormArgs,
    #[command(flatten)]
    store: StoreArgs,
}

/// Makes a layer of random weights, checks its results and times it.
pub fn execute(args: &BenchArgs, console: &Console) -> Result {
    if args.ranks.is_some() {
        return calibrate::execute(args, console);
    }
    let budget = args.budget()?;
    refuse_simulators(&args.target.name)?;
    let spec = args.layer.load(console)?.spec;
    let options = args.options(console);
    let engine = targets::open(&args.target.name, options, |asked| args.fits(asked))?;
    for &tokens in &args.tokens.counts.0 {
        engine.check_tokens(&spec, tokens)?;
    }
    let progress = Progress::start("making weights");
    let weights = random::weights(&spec)?;
    progress.next("getting kernels");
    let layer = if args.training {
        engine.training_layer(&spec, &weights, Training::default())?
    } else {
        engine.layer(&spec, &weights)?
    };
    progress.next("checking");
    let error = check::check(&layer, &spec, &weights)?;
    let machine = args.machine(&engine)?;
    let machine = machine.map(|machine| machine.with_tf32(spec.precision.tf32));
    let mut runs = Vec::new();
    for &tokens in &args.tokens.counts.0 {
        progress.next(format!("timing {tokens} tokens"));
        let calls = args.calls(&layer, &weights, tokens)?;
        runs.push(measure::measure(&layer, &calls, budget)?);
    }
    progress.next("measuring the machine again");
    let limits = machine.map(|machine| args.watch(machine, &engine));
    drop(progress);
    let limits = limits.transpose()?;
    if let Some(warning) = limits.as_ref().and_then(Watched::warning) {
        console.warn(&warning);
    }
    let report = report::BenchReport {
        engine: &engine,
        layer: &layer,
        limits,
        error,
        skew: args.skew,
        runs,
    };
    if args.form.json {
        console.json(&report.json())
    } else {
        console.report(&report.text(&console.out))
    }
}

/// Refuses simulators, because a simulator's time says nothing about a GPU.
fn refuse_simulators(target: &str) -> Result {
    if target.split(':').next() != Some("sim") {
        return Ok(());
    }
    // An unknown name is the better error, so report it first.
    let target = crate::targets::resolve_one(target)?;
    Err(Failure::input(format!(
        "`{target}` is a simulator: it counts what kernels do, its times mean nothing"
    ))
    .hint(format!(
        "`moesaic inspect --target {target} --simulate 64` counts; `--target {}` times, on a GPU",
        target.hardware()
    )))
}

impl BenchArgs {
    /// Returns the time to repeat each token count for.
    fn budget(&self) -> Result<Duration> {
        Duration::try_from_secs_f64(self.seconds)
            .map_err(|_| Failure::input("--seconds must be a number, and not below 0"))
    }

    fn options(&self, console: &Console) -> EngineOptions {
        self.threads.of(EngineOptions {
            store: Some(self.store.open(console)),
            ..EngineOptions::default()
        })
    }

    /// Refuses options that do not fit the target.
    fn fits(&self, asked: &Asked<'_>) -> Result {
        self.threads.check(asked)?;
        match &self.machine {
            Some(name) => machine::required(name, asked.target).map(drop),
            None => Ok(()),
        }
    }

    fn calls(&self, layer: &Layer, weights: &Tensors<'_>, tokens: usize) -> Result<TimedCalls> {
        let spec = layer.spec();
        let call = |input| TimedCall::new(layer, input);
        let led = |skew| lead::input(spec, weights, tokens, skew).map(call);
        let uniform = match self.skew {
            Some(Skew::Zipf(_)) => Some(led(Skew::Uniform)?),
            _ => None,
        };
        let own = match self.skew {
            Some(skew) => led(skew)?,
            None => call(random::input(spec, tokens)),
        };
        Ok(TimedCalls { own, uniform })
    }

    fn machine(&self, engine: &Engine) -> Result<Option<MachineLimits>> {
        if let Some(name) = &self.machine {
            return machine::required(name, engine.target()).map(Some);
        }
        match engine.target() {
            Target::Cpu(isa) => MachineLimits::measure_cpu(&self.cpu()?, isa).map(Some),
            target => Ok(MachineLimits::of_device(&engine.device_info().name, target)),
        }
    }

    /// Measures a CPU again, because another program may have taken part of it in the meantime.
    fn watch(&self, machine: MachineLimits, engine: &Engine) -> Result<Watched> {
        let later = match engine.target() {
            Target::Cpu(isa) => MachineLimits::measure_cpu(&self.cpu()?, isa)?,
            _ => machine.clone(),
        };
        Ok(machine.watched(&later))
    }

    fn cpu(&self) -> Result<CpuDevice> {
        match self.threads.count() {
            Some(threads) => CpuDevice::with_threads(threads).map_err(|e| Failure::from(&e)),
            None => Ok(CpuDevice::new()),
        }
    }
}
