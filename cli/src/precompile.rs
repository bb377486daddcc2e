//! `moesaic precompile`.

use crate::caches::CacheSizeArgs;
use crate::console::Console;
use crate::failure::{Failure, Result};
use crate::files::Files;
use crate::form::FormArgs;
use crate::spec_source::{LayerArgs, ModelArgs, needs_numbers, read_model, read_spec};
use crate::store::{StoreArgs, place, tuning};
use crate::table::{Cell, Table};
use crate::targets::{self, TargetsArgs};
use crate::training::TrainingArgs;
use crate::{experts, mesh, units};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use moesaic::aot::{KernelOutcome, KernelRow, MeshJob, PrecompileEvent, PrecompileJob};
use moesaic::cache::Tuned;
use moesaic::engine::{TunedPlans, Untuned, precompile_on};
use moesaic::plan::{Placement, Tuning, plan, stacked};
use moesaic::target::{ArtifactReport, CompileOptions, Scratch};
use moesaic::train::replay::RoutedExperts;
use moesaic::{Compilers, EngineError, LayerSpec, Parallel, PlanOptions, Store, Strategy, Target};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Compile kernels for any target into a cache or a pack
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  moesaic precompile --spec layer.toml --target cpu,cuda:sm_90a
  moesaic precompile --spec layer.toml --target cuda:sm_90a --training
  moesaic precompile --spec a.toml,b.toml --target cuda:sm_80,rocm:gfx942 -o pack.tar.gz
  moesaic precompile --hf ~/models/qwen3-30b-a3b --target cuda:sm_90a -o pack.tar.gz
  moesaic precompile --spec layer.toml --target cuda:sm_90a --mesh ep=8 --placement experts.txt
  moesaic precompile --spec layer.toml --target cpu:avx512 --l1 32KiB --l2 1MiB -o pack.tar.gz

--target takes GPUs by name, too: h100, a100, mi300x. Compiling needs no GPU and no driver. Running \
the kernels needs NVIDIA's driver 580 or newer if NVRTC 13 compiled them, which `moesaic toolchain \
install cuda` brings, 525 or newer if NVRTC 12 did, and ROCm 6.0 or newer on AMD's GPUs. Kernels \
for CPUs depend on cache sizes: those of this machine, or --l1 and --l2. `moesaic cache import \
pack.tar.gz` adds a pack to another machine's cache.")]
#[command(mut_arg("target", |arg| arg.required(true)))]
pub struct PrecompileArgs {
    /// The layer specs, TOML files
    #[arg(value_name = "SPEC")]
    files: Vec<PathBuf>,
    /// The layer specs, as an option
    #[arg(
        long,
        value_name = "FILE[,FILE]",
        value_delimiter = ',',
        required_unless_present_any = ["files", "model"]
    )]
    spec: Vec<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
    /// Index of the layer in the model; all layers with experts if not given
    #[arg(long, value_name = "N", requires = "model")]
    layer: Option<usize>,
    #[command(flatten)]
    target: TargetsArgs,
    #[command(flatten)]
    training: TrainingArgs,
    /// Compile the kernels of ranks in this mesh instead of one process's
    #[arg(long, value_name = mesh::FORM, value_parser = mesh::parse)]
    mesh: Option<Parallel>,
    /// Also compile kernels for every adaptive parallelism degree r, in layers that may change it
    #[arg(long, requires = "mesh")]
    adaptive_r: bool,
    /// Also compile kernels for this strategy of ranks, as in `run`: r, comm_dtype and shadows have
    /// kernels of their own; may be given several times
    #[arg(long, value_name = "S", value_parser = str::parse::<Strategy>, requires = "mesh")]
    strategy: Vec<Strategy>,
    /// Also compile kernels for this placement of experts, as for `plan`, instead of experts in
    /// order; may be given several times. One placement stands for all that give each rank the same
    /// number of experts
    #[arg(long, value_name = "FILE", requires = "mesh")]
    placement: Vec<PathBuf>,
    /// Also compile kernels for `Engine::multi_gate`, which runs several routers over the same
    /// experts in one pass
    #[arg(long, conflicts_with_all = ["mesh", "adaptive_r", "strategy", "placement"])]
    multi_gate: bool,
    /// Also compile kernels for `run --replay`, which has the layer without its router; with =FILE,
    /// vLLM's array in an .npy file, kernels that look up experts in a table of its tokens
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    replay: Option<Option<PathBuf>>,
    #[command(flatten)]
    caches: CacheSizeArgs,
    /// Also write these kernels, and no others of the cache, to a pack
    #[arg(short, long, value_name = "PACK")]
    output: Option<PathBuf>,
    #[command(flatten)]
    store: StoreArgs,
    /// Kernels compiled at the same time; all cores if not given
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
    #[command(flatten)]
    form: FormArgs,
}

/// Compiles everything, then reports every kernel.
pub fn execute(args: &PrecompileArgs, console: &Console) -> Result {
    Files::new()
        .read("--spec", args.toml())
        .read("--placement", &args.placement)
        .read("--replay", args.replay.iter().flatten())
        .model(args.model.hf.as_deref())
        .checkpoint("--gguf", args.model.gguf.as_deref())
        .written("--output", &args.output)
        .check()?;
    let mut specs = args.specs(console)?;
    let replayed = args.replayed(&specs)?;
    specs = args.with_stacks(specs)?;
    specs.extend(replayed);
    let targets = targets::resolve(&args.target.names)?;
    args.caches.check(&targets)?;
    let ranks = args.mesh.map(|mesh| args.over_ranks(mesh)).transpose()?;
    if let Some(ranks) = &ranks {
        args.check_ranks(ranks, &specs)?;
    }
    if let Some(pack) = &args.output {
        check_pack(pack)?;
    }
    let mut store = args.store.open(console);
    // A pack can be written without a usable cache, from a temporary one.
    let temporary = (args.output.is_some() && store.trouble().is_some()).then(temporary_dir);
    let temporary = temporary.transpose()?;
    if let Some(dir) = &temporary {
        store = Arc::new(Store::open(dir.path()));
    }
    let (jobs, tunings) = args.all_jobs(&specs, &targets, ranks.as_ref(), &store)?;
    let options = CompileOptions::default();
    let started = Instant::now();
    let rows =
        with_progress(|progress| precompile_on(args.threads(), &jobs, &store, &options, progress))?;
    let time = started.elapsed();
    let place = match &args.output {
        Some(pack) => export(&store, &rows, pack)?,
        None => place(&store),
    };
    if args.form.json {
        console.json(&as_json(&rows, &tunings, time, &place))?
    } else {
        console.print(&as_text(&rows, &tunings, time, &place, console))?
    }
    outcome(&rows, &store)
}

/// Returns the cached tunings of a layer, from all machines whose CPU caches have the same class.
fn kept(
    spec: &LayerSpec,
    target: Target,
    options: &PlanOptions,
    store: &Store,
) -> Result<Vec<TunedPlans>> {
    if !store.has_tunings(target) {
        return Ok(Vec::new());
    }
    let plan = plan(spec, target, options).map_err(EngineError::from)?;
    Ok(Untuned::new(plan).everywhere(store))
}

/// Writes a pack of the kernels of `rows`, and returns a description of it.
fn export(store: &Store, rows: &[KernelRow], path: &Path) -> Result<String> {
    let keys: HashSet<_> = rows.iter().map(|row| row.key).collect();
    let pack = store.export(path, |kernel| keys.contains(&kernel.key))?;
    let kernels = units::count(pack.kernels, "kernel");
    Ok(format!(
        "{} ({kernels}, {})",
        path.display(),
        units::bytes(pack.bytes)
    ))
}

impl PrecompileArgs {
    /// Lists a job for every layer and target, plus one for each set of tile sizes from a cached
    /// tuning. Also returns those tunings.
    fn all_jobs(
        &self,
        specs: &[LayerSpec],
        targets: &[Target],
        ranks: Option<&MeshJob>,
        store: &Arc<Store>,
    ) -> Result<(Vec<PrecompileJob>, Vec<Tuned>)> {
        let compilers = Compilers::new(Some(store.clone()));
        check_compilers(&compilers, targets)?;
        let (mut jobs, mut tunings) = (Vec::new(), Vec::new());
        for (spec, &target) in specs
            .iter()
            .flat_map(|s| targets.iter().map(move |t| (s, t)))
        {
            let compiler = compilers
                .get(target)
                .map_err(|error| Failure::from(&error))?;
            let options = self.plan_options(target);
            let job = |tuning: Tuning| PrecompileJob {
                spec: spec.clone(),
                target,
                options: PlanOptions {
                    tuning,
                    ..options.clone()
                },
                mesh: ranks.cloned(),
                compiler: compiler.clone(),
            };
            jobs.push(job(Tuning::default()));
            if ranks.is_some() {
                continue; // tunings are of one process
            }
            for kept in kept(spec, target, &options, store)? {
                let others = kept.tilings.plans().iter().skip(1);
                jobs.extend(others.map(|plan| job(plan.tuning.clone())));
                tunings.push(kept.tuned);
            }
        }
        Ok((jobs, tunings))
    }

    /// Returns the job of ranks: the mesh with its strategies and placements.
    fn over_ranks(&self, mesh: Parallel) -> Result<MeshJob> {
        let files = self.placement.iter();
        let placements = files.map(|file| experts::placement(Some(file)));
        let placements: Vec<Option<Placement>> = placements.collect::<Result<_>>()?;
        let comm_dtypes: Vec<_> = self
            .strategy
            .iter()
            .map(|strategy| strategy.comm_dtype)
            .collect();
        let ranks = if self.adaptive_r {
            MeshJob::for_any_r(mesh, &comm_dtypes)
        } else {
            MeshJob {
                strategies: self.strategy.clone(),
                ..MeshJob::from(mesh)
            }
        };
        Ok(MeshJob {
            placements: placements.into_iter().flatten().collect(),
            ..ranks
        })
    }

    /// Refuses strategies and placements that do not fit the mesh or a layer, before anything is
    /// compiled.
    fn check_ranks(&self, ranks: &MeshJob, specs: &[LayerSpec]) -> Result {
        for strategy in &self.strategy {
            strategy.check(&ranks.parallel).map_err(Failure::input)?;
        }
        for spec in specs {
            for placement in &ranks.placements {
                let checked = placement.check(&ranks.parallel, spec.shape.experts);
                checked.map_err(|error| Failure::input(format!("{}: {error}", spec.name)))?;
            }
        }
        Ok(())
    }

    /// Returns the layers that `--replay` runs in the place of these.
    fn replayed(&self, specs: &[LayerSpec]) -> Result<Vec<LayerSpec>> {
        let Some(file) = &self.replay else {
            return Ok(Vec::new());
        };
        let Some(file) = file else {
            return Ok(specs.iter().map(LayerSpec::decided_elsewhere).collect());
        };
        let record = RoutedExperts::read(file).map_err(Failure::input)?;
        let wrong = |error| Failure::input(format!("--replay {}: {error}", file.display()));
        let table = |spec| record.spec(spec).map_err(wrong);
        specs.iter().map(table).collect()
    }

    /// Returns the layers. With `--multi-gate` adds, for each layer that allows it, the layer in
    /// which several routers share the experts.
    fn with_stacks(&self, specs: Vec<LayerSpec>) -> Result<Vec<LayerSpec>> {
        if !self.multi_gate {
            return Ok(specs);
        }
        let stacks: Vec<LayerSpec> = specs.iter().filter_map(stacked).collect();
        if stacks.is_empty() {
            let message = "--multi-gate does nothing here: routers over experts with a capacity, \
                           a latent projection or a norm of outputs, and routing from outside run \
                           one by one";
            return Err(Failure::input(message).hint("leave it out"));
        }
        Ok([specs, stacks].concat())
    }

    /// Returns whether ranks may gather weights, which therefore must not be packed.
    fn unpacked(&self) -> bool {
        let other = |mesh: Parallel| {
            let mut all = self.strategy.iter();
            all.any(|strategy| strategy.gathers(&mesh))
        };
        self.adaptive_r || self.mesh.is_some_and(other)
    }

    fn plan_options(&self, target: Target) -> PlanOptions {
        PlanOptions {
            training: self.training.get(),
            caches: self.caches.here(target),
            unpacked: self.unpacked(),
            ..PlanOptions::default()
        }
    }

    /// Returns the number of compiles that run at the same time.
    fn threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
        self.jobs.map_or_else(cores, usize::from)
    }

    /// Returns the TOML files, however they were named.
    fn toml(&self) -> impl Iterator<Item = &PathBuf> {
        self.files.iter().chain(&self.spec)
    }

    fn specs(&self, console: &Console) -> Result<Vec<LayerSpec>> {
        let mut specs: Vec<LayerSpec> = self
            .toml()
            .map(|path| read_spec(path, console))
            .collect::<Result<_>>()?;
        let model = self.model.read()?;
        let numbers = needs_numbers(self.mesh);
        if let (Some(model), None) = (&model, self.layer) {
            specs.extend(read_model(model, self.model.dequantize, numbers, console)?);
        } else if model.is_some() {
            let layer = LayerArgs::of_model(&self.model, self.layer);
            specs.push(layer.load_for(numbers, console)?.spec);
        }
        Ok(specs)
    }
}

/// Refuses the targets without a compiler, all in one failure, so one `toolchain install` follows.
fn check_compilers(compilers: &Compilers, targets: &[Target]) -> Result {
    let missing = targets
        .iter()
        .filter_map(|&target| compilers.get(target).err());
    let mut failures: Vec<Failure> = Vec::new();
    for failure in missing.map(|error| Failure::from(&error)) {
        // Targets of one backend fail alike.
        if !failures.contains(&failure) {
            failures.push(failure);
        }
    }
    let Some(mut all) = failures.first().cloned() else {
        return Ok(());
    };
    let messages = failures.iter().map(|failure| failure.message.trim_end());
    all.message = messages.collect::<Vec<_>>().join("\n");
    Err(all)
}

fn check_pack(pack: &Path) -> Result {
    let dir = pack
        .parent()
        .filter(|dir| !dir.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    match (pack.is_dir(), dir.is_dir()) {
        (true, _) => Err(Failure::input(format!(
            "{} is a directory, not a file",
            pack.display()
        ))),
        (_, false) => Err(Failure::input(format!(
            "there is no directory {}",
            dir.display()
        ))),
        _ => Ok(()),
    }
}

fn temporary_dir() -> Result<Scratch> {
    Scratch::new()
        .map_err(|error| Failure::work(format!("cannot make a temporary directory: {error}")))
}

/// Runs `work` with a progress bar, which only a terminal shows.
fn with_progress<T, E>(
    work: impl FnOnce(&(dyn Fn(PrecompileEvent<'_>) + Sync)) -> std::result::Result<T, E>,
) -> std::result::Result<T, E> {
    let bar = ProgressBar::no_length();
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    let result = work(&|event| match event {
        PrecompileEvent::Start(count) => bar.set_length(count as u64),
        PrecompileEvent::Done(row) => {
            bar.set_message(format!("{} {}", row.target, row.kernel));
            bar.inc(1);
        }
    });
    bar.finish_and_clear();
    result
}

fn outcome(rows: &[KernelRow], store: &Store) -> Result {
    let failed = rows
        .iter()
        .filter(|row| matches!(row.outcome, KernelOutcome::Failed(_)))
        .count();
    if failed > 0 {
        let of = units::count(rows.len(), "kernel");
        return Err(Failure::work(format!(
            "{failed} of {of} did not compile; the others are kept"
        )));
    }
    // Without a writable cache the kernels are lost, so the command has failed.
    let lost = rows
        .iter()
        .filter(|row| store.get(&row.key).is_none())
        .count();
    match lost {
        0 => Ok(()),
        n => {
            let kernels = units::count(n, "kernel");
            let place = place(store);
            Err(Failure::work(format!(
                "{kernels} could not be kept in {place}"
            )))
        }
    }
}

/// Returns the registers of the kernel's entry that takes the most.
pub fn most_registers(report: &ArtifactReport) -> Option<u32> {
    report
        .kernels
        .iter()
        .filter_map(|kernel| kernel.registers)
        .max()
}

fn as_text(
    rows: &[KernelRow],
    tunings: &[Tuned],
    time: Duration,
    place: &str,
    console: &Console,
) -> String {
    let titles = [
        "LAYER",
        "KERNEL",
        "TARGET",
        ">BYTES",
        ">REGISTERS",
        ">COMPILE",
        "CACHE",
    ];
    let mut table = Table::new(&titles);
    for row in rows {
        table.row(cells(row));
    }
    let mut text = table.render(&console.out);
    for row in rows {
        if let KernelOutcome::Failed(error) = &row.outcome {
            let failure = Failure::work(format!("{} for {}: {error}", row.kernel, row.target));
            text += &format!("\n{}\n", failure.render(&console.out));
        }
    }
    text += &format!("\n{}, in {}\n", summary(rows, time), place);
    let tunings = tunings.iter().map(|tuned| tuning(tuned) + "\n");
    text + &tunings.collect::<String>()
}

fn cells(row: &KernelRow) -> Vec<Cell> {
    let mut cells: Vec<Cell> = vec![
        row.layer.as_str().into(),
        row.kernel.as_str().into(),
        row.target.to_string().into(),
    ];
    let built = |report: &ArtifactReport, bytes: u64, state: Cell| {
        let registers = most_registers(report).map_or("-".to_string(), |n| n.to_string());
        let time = units::seconds(report.compile_ms / 1e3);
        vec![
            bytes.to_string().into(),
            registers.into(),
            time.into(),
            state,
        ]
    };
    cells.extend(match &row.outcome {
        KernelOutcome::Hit(report, bytes) => built(report, *bytes, "hit".into()),
        KernelOutcome::Compiled(report, bytes) => built(report, *bytes, Cell::styled("miss", "33")),
        KernelOutcome::Failed(_) => ["-", "-", "-"]
            .map(Cell::from)
            .into_iter()
            .chain([Cell::styled("failed", "31")])
            .collect(),
    });
    cells
}

fn summary(rows: &[KernelRow], time: Duration) -> String {
    let count = |is: fn(&KernelOutcome) -> bool| rows.iter().filter(|row| is(&row.outcome)).count();
    let hits = count(|outcome| matches!(outcome, KernelOutcome::Hit(..)));
    let compiled = count(|outcome| matches!(outcome, KernelOutcome::Compiled(..)));
    let failed = count(|outcome| matches!(outcome, KernelOutcome::Failed(_)));
    let failed = if failed > 0 {
        format!(", {failed} failed")
    } else {
        String::new()
    };
    let time = units::seconds(time.as_secs_f64());
    format!(
        "{}: {compiled} compiled, {hits} from the cache{failed}, {time}",
        units::count(rows.len(), "kernel")
    )
}

fn as_json(rows: &[KernelRow], tunings: &[Tuned], time: Duration, place: &str) -> Value {
    let row = |row: &KernelRow| {
        let mut value = json!({
            "layer": row.layer,
            "kernel": row.kernel,
            "target": row.target.to_string(),
            "key": row.key.to_string(),
        });
        let built = |state, report: &ArtifactReport, bytes: u64| {
            json!({
                "state": state,
                "bytes": bytes,
                "registers": most_registers(report),
                "compile_ms": report.compile_ms,
                "compiler": report.compiler,
            })
        };
        let more = match &row.outcome {
            KernelOutcome::Hit(report, bytes) => built("hit", report, *bytes),
            KernelOutcome::Compiled(report, bytes) => built("miss", report, *bytes),
            KernelOutcome::Failed(error) => {
                json!({ "state": "failed", "error": error.to_string() })
            }
        };
        if let (Some(value), Value::Object(more)) = (value.as_object_mut(), more) {
            value.extend(more);
        }
        value
    };
    json!({
        "kernels": rows.iter().map(row).collect::<Vec<_>>(),
        "tunings": tunings,
        "seconds": time.as_secs_f64(),
        "place": place,
    })
}
