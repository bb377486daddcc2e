//! `moesaic tune`.

mod measure;
mod report;
mod search;

use crate::console::Console;
use crate::counts::TokensArgs;
use crate::failure::{Failure, Result};
use crate::form::FormArgs;
use crate::progress::Progress;
use crate::random;
use crate::spec_source::LayerArgs;
use crate::store::StoreArgs;
use crate::targets::TargetArgs;
use crate::threads::ThreadArgs;
use crate::training::TrainingArgs;
use clap::Args;
use measure::Bench;
use moesaic::aot::{KernelOutcome, PrecompileJob, precompile};
use moesaic::engine::{TunedTimes, Untuned};
use moesaic::plan::Tuning;
use moesaic::target::CompileOptions;
use moesaic::{Compilers, Engine, EngineOptions, LayerSpec, PlanOptions, Store};
use search::Found;
use std::collections::BTreeSet;
use std::iter;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The help of `--target`.
const WHERE: &str = "Where to measure: cpu, or with an instruction set, as in cpu:avx2";

/// Measure which tiles are best for a layer on this CPU, and use them from now on
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  moesaic tune --spec layer.toml
  moesaic tune --spec layer.toml --tokens 1,8 --threads 8 --pin
  moesaic tune --spec layer.toml --training --tokens 4096 --seconds 2

Each of --tokens gets the tiles that are best for it, and a call uses those of the token count that \
is nearest by ratio. The cache keeps the result for this CPU model, this number of threads and these \
kernels, and engines use it from then on; a new result replaces an old one. Tiles change no byte of \
results. MOESAIC_TUNING=off makes engines ignore them.")]
#[command(
    mut_arg("target", |arg| arg.help(WHERE)),
    mut_arg("tokens", |arg| arg.help("Token counts, each to be measured by itself"))
)]
pub struct TuneArgs {
    #[command(flatten)]
    layer: LayerArgs,
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    tokens: TokensArgs,
    #[command(flatten)]
    threads: ThreadArgs,
    /// Seconds for each size at each token count
    #[arg(long, value_name = "S", default_value_t = 0.5)]
    seconds: f64,
    #[command(flatten)]
    training: TrainingArgs,
    #[command(flatten)]
    form: FormArgs,
    #[command(flatten)]
    store: StoreArgs,
}

/// Makes a layer of random weights, times the candidates for its tile sizes and keeps the best.
pub fn execute(args: &TuneArgs, console: &Console) -> Result {
    let budget = Duration::try_from_secs_f64(args.seconds)
        .map_err(|_| Failure::input("--seconds must be a number, and not below 0"))?;
    refuse_others(&args.target.name)?;
    if args.tokens.counts.0.contains(&0) {
        return Err(Failure::input("--tokens: no tokens take no time"));
    }
    let spec = args.layer.load(console)?.spec;
    let store = args.store.open(console);
    store.can_keep_tunings()?;
    let engine = Engine::open(&args.target.name, args.options())?;
    let tokens: BTreeSet<usize> = args.tokens.counts.0.iter().copied().collect();
    for &tokens in &tokens {
        engine.check_tokens(&spec, tokens)?;
    }
    let progress = Progress::start("making weights");
    let weights = random::weights(&spec)?;
    progress.next("getting kernels");
    let variants = engine.variants(&spec, &weights, args.training.get())?;
    let search = |tokens| {
        let input = random::input(&spec, tokens);
        search::search(&variants, &Bench { input, budget }, &progress)
    };
    let found: Vec<Found> = tokens.into_iter().map(search).collect::<Result<_>>()?;
    progress.next("compiling the best");
    let file = args.keep(&found, &engine, variants.untuned(), &store)?;
    drop(progress);
    let report = report::TuneReport {
        engine: &engine,
        spec: &spec,
        found: &found,
        file: &file,
    };
    if args.form.json {
        console.json(&report.json())
    } else {
        console.report(&report.text(&console.out))
    }
}

/// Refuses targets other than CPUs, which alone have sizes to choose so far.
fn refuse_others(target: &str) -> Result {
    if target.split(':').next() == Some("cpu") {
        return Ok(());
    }
    if !["auto", "cuda", "rocm"].contains(&target) {
        // An unknown name is the better error, so report it first.
        crate::targets::resolve_one(target)?;
    }
    Err(
        Failure::input(format!("`{target}` cannot be tuned: only CPUs can so far"))
            .hint("--target cpu, or with an instruction set, as in cpu:avx2"),
    )
}

impl TuneArgs {
    /// Returns the options of the engine. Candidates start from the default sizes and stay out of
    /// the cache.
    fn options(&self) -> EngineOptions {
        self.threads.of(EngineOptions {
            store: None,
            tuned: false,
            ..EngineOptions::default()
        })
    }

    /// Stores the kernels and then the sizes in the cache, and returns the file of the sizes.
    fn keep(
        &self,
        found: &[Found],
        engine: &Engine,
        untuned: &Untuned,
        store: &Arc<Store>,
    ) -> Result<PathBuf> {
        let best: Vec<TunedTimes> = found.iter().map(|one| one.best.clone()).collect();
        let tuned = untuned.tuned(&best, engine.machine())?;
        self.compile(&best, engine, &untuned.plan.spec, store)?;
        Ok(store.keep_tuned(&tuned)?)
    }

    fn compile(
        &self,
        best: &[TunedTimes],
        engine: &Engine,
        spec: &LayerSpec,
        store: &Arc<Store>,
    ) -> Result {
        let target = engine.target();
        let compiler = Compilers::new(Some(store.clone()))
            .get(target)
            .map_err(|error| Failure::from(&error))?;
        let job = |tuning: Tuning| PrecompileJob {
            spec: spec.clone(),
            target,
            options: PlanOptions {
                training: self.training.get(),
                tuning,
                caches: engine.caches(),
                ..PlanOptions::default()
            },
            mesh: None,
            compiler: compiler.clone(),
        };
        let tunings = best.iter().map(|one| one.tuning.clone());
        let tunings = iter::once(Tuning::default()).chain(tunings);
        let jobs: Vec<PrecompileJob> = tunings.map(job).collect();
        for row in precompile(&jobs, store, &CompileOptions::default(), &|_| {})? {
            if let KernelOutcome::Failed(error) = row.outcome {
                return Err(error.into());
            }
        }
        Ok(())
    }
}
