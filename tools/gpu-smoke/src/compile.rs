//! Kernels for a machine that has no compiler.

use crate::items::{Item, Suite};
use crate::pass::Pass;
use crate::timing::Made;
use crate::{Result, cuda, data, launches, layers, limits, suite};
use clap::Args;
use moesaic::aot::{KernelOutcome, PrecompileEvent, precompile};
use moesaic::spec::LayerSpec;
use moesaic::{CompileOptions, Compilers, Engine, EngineOptions, Store, Target, Training};
use moesaic_probe::idle::Idle;
use moesaic_probe::kept::Keeping;
use moesaic_probe::report::{Outcome as Found, Row};
use moesaic_target::Compiler;
use moesaic_toolchain::{Registry, nvrtc};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What is compiled.
#[derive(Args)]
pub struct Options {
    /// What for: `cuda:sm_90a`, or a simulator such as `sim:sm_90a`.
    #[arg(long)]
    target: Target,
    /// The folder with the fixtures of the oracles.
    #[arg(long)]
    data: PathBuf,
    /// The folder that gets the pack and the kernels of probe and check.
    #[arg(long)]
    out: PathBuf,
    /// Where kernels are kept from one call to the next; the user's cache if not given.
    #[arg(long)]
    store: Option<PathBuf>,
    /// What the tiny steps ask for.
    #[arg(long)]
    tiny: bool,
}

/// The pack's name in the folder.
const PACK: &str = "layers.tar.gz";

/// Compiles everything for one target.
///
/// # Errors
/// When there is no compiler, or a file cannot be written.
pub fn compile(options: &Options) -> Result<ExitCode> {
    std::fs::create_dir_all(&options.out)?;
    let failed = layers_of(options)? + device_kernels(options)? + misses(options)?;
    Ok(ExitCode::from(u8::from(failed > 0)))
}

/// How many items ask for a kernel that the pack lacks. They run on a device on which nothing
/// happens: every result is wrong there, and every kernel is asked for.
fn misses(options: &Options) -> Result<usize> {
    let folder = tempfile::tempdir()?;
    unpack(&options.out.join(PACK), folder.path().to_path_buf())?;
    let engine = idle(options.target, folder.path())?;
    let suites = Suite::ALL.into_iter();
    let items = suites.flat_map(|suite| suite.items(&options.data, options.tiny));
    let mut misses = 0;
    eprintln!("items ask for their kernels; nothing runs yet, so what they say of losses is wrong");
    for item in items {
        if let Err(why) = suite::caught(&item, &engine)
            && why.contains("is not in the cache")
        {
            misses += 1;
            println!("{}: {why}", item.name);
        }
    }
    for (_, spec) in launches::specs() {
        let weights = data::weights(&spec, layers::DTYPE);
        for pass in [Pass::Forward, Pass::Both] {
            Made::new(&engine, &spec, &weights, pass)?;
        }
    }
    println!("{misses} kernels that a suite asks for are missing");
    Ok(misses)
}

/// A strict engine over a device on which nothing happens. The compiler that is here made
/// the kernels, so that their keys are those it asks for.
fn idle(target: Target, store: &Path) -> Result<Engine> {
    let options = EngineOptions {
        store: Some(Arc::new(Store::open(store).strict())),
        strict: true,
        tuned: false,
        ..EngineOptions::default()
    };
    let device = Idle::new(target);
    Ok(Engine::on_device(Arc::new(device), options)?)
}

/// Fills the folder `store` with what a pack holds.
///
/// # Errors
/// When the pack cannot be read, or a kernel of it cannot be kept.
pub fn unpack(pack: &Path, store: PathBuf) -> Result<ExitCode> {
    let imported = Store::open(store).import(pack)?;
    println!("{imported:?}");
    Ok(ExitCode::SUCCESS)
}

/// Every layer that a step makes, and how.
fn jobs(options: &Options) -> Vec<(LayerSpec, Option<Training>)> {
    let suites = Suite::ALL.into_iter();
    let items = suites.flat_map(|suite| suite.items(&options.data, options.tiny));
    let mut jobs: Vec<_> = items
        .map(|Item { spec, training, .. }| (spec, training))
        .collect();
    let both = |spec: LayerSpec| [(spec.clone(), None), (spec, Some(Training::default()))];
    jobs.extend(
        launches::specs()
            .into_iter()
            .flat_map(|(_, spec)| both(spec)),
    );
    // A whole folder is asked for tiny layers, too.
    let sizes: &[bool] = if options.tiny {
        &[true]
    } else {
        &[true, false]
    };
    for &tiny in sizes {
        let shapes = layers::shapes(tiny).into_iter();
        jobs.extend(shapes.flat_map(|shape| both(shape.spec(layers::DTYPE))));
        jobs.push((limits::product(tiny), None));
    }
    jobs
}

/// How many kernels of layers could not be compiled.
fn layers_of(options: &Options) -> Result<usize> {
    let store = options.store.as_ref();
    let store = Arc::new(store.map_or_else(Store::open_default, Store::open));
    let compilers = Compilers::new(Some(store.clone()));
    let jobs = jobs(options).into_iter();
    let jobs = jobs.map(|(spec, training)| compilers.job(&spec, options.target, training));
    let jobs = jobs.collect::<std::result::Result<Vec<_>, _>>()?;
    let (all, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let tell = |event: PrecompileEvent<'_>| match event {
        PrecompileEvent::Start(count) => all.store(count, Ordering::Relaxed),
        PrecompileEvent::Done(_) => {
            let done = done.fetch_add(1, Ordering::Relaxed) + 1;
            if done.is_multiple_of(100) {
                eprintln!("{done} of {} kernels", all.load(Ordering::Relaxed));
            }
        }
    };
    let rows = precompile(&jobs, &store, &CompileOptions::default(), &tell)?;
    let mut failed = 0;
    for row in &rows {
        if let KernelOutcome::Failed(error) = &row.outcome {
            failed += 1;
            println!("{} of {}: {error}", row.kernel, row.layer);
        }
    }
    let keys: std::collections::BTreeSet<_> = rows.iter().map(|row| row.key).collect();
    let pack = options.out.join(PACK);
    let exported = store.export(&pack, |listed| keys.contains(&listed.key))?;
    println!(
        "{} kernels of {} layers for {}, {failed} failed, {} bytes in {}",
        exported.kernels,
        jobs.len(),
        options.target,
        exported.bytes,
        pack.display()
    );
    Ok(failed)
}

/// The kernels of the probe and of the check of the device, where the target is hardware:
/// the probe compiles for simulators as it goes.
fn device_kernels(options: &Options) -> Result<usize> {
    if !matches!(options.target, Target::Cuda(_)) {
        return Ok(0);
    }
    let folder = options.out.join("probe");
    let bench = moesaic_probe::open::keeping(&options.target.to_string(), &folder)?;
    let report = moesaic_probe::run(&bench, |_| ());
    let failed = |row: &&Row| {
        let failed = matches!(row.outcome, Found::Failed(_));
        if failed {
            println!("{row}");
        }
        failed
    };
    let failed = report.rows.iter().filter(failed).count();
    check(options)?;
    Ok(failed)
}

fn check(options: &Options) -> Result {
    let compiler = nvrtc(&Registry::open()?)?;
    // `run.sh` holds it against the card and its driver.
    let (major, minor) = compiler.version();
    let made = format!("{} {major}.{minor}\n", options.target);
    std::fs::write(options.out.join("made"), made)?;
    let keeping = Keeping {
        compiler: Box::new(compiler),
        folder: options.out.join("check"),
    };
    keeping.compile(&cuda::source(options.target), &CompileOptions::default())?;
    Ok(())
}
