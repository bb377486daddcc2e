//! Everything an inspection shows, as data.

use super::counted::Counted;
use crate::failure::{Failure, Result};
use crate::machine::Machine;
use crate::suggest::closest;
use moesaic::cache::{self, Tuned};
use moesaic::cpu::CpuDevice;
use moesaic::emit::emit_layer;
use moesaic::plan::{KernelDesc, KernelPlan, LayerPlan, Step, plan_for};
use moesaic::target::{Artifact, CompileOptions, Device, KernelReport};
use moesaic::{
    Compilers, DType, EngineError, EngineOptions, Job, KernelSource, LayerSpec, Outcome, Row, Stem,
    Store, Target, Training, Untuned, Work, precompile,
};
use std::sync::Arc;

/// What is asked for.
pub struct Request<'a> {
    pub spec: &'a LayerSpec,
    pub target: Target,
    pub training: Option<Training>,
    pub tokens: &'a [u64],
    pub kernel: Option<&'a str>,
    pub machine: Option<Machine>,
    pub store: Arc<Store>,
}

/// A layer on a target.
pub struct Inspection {
    pub target: Target,
    pub plan: LayerPlan,
    pub tokens: Vec<u64>,
    pub machine: Option<Machine>,
    pub kernels: Vec<Kernel>,
    pub launches: Vec<Launch>,
    /// Why nothing was compiled.
    pub trouble: Option<String>,
    /// What was measured to be best here, if it was; its sizes are in the plan.
    pub tuned: Option<Tuned>,
    /// What a simulator counted, when it was asked to.
    pub counted: Option<Counted>,
}

/// A kernel source and what its binary says.
pub struct Kernel {
    pub source: KernelSource,
    /// Absent when it was not compiled.
    pub artifact: Option<Artifact>,
    /// Whether the cache had it.
    pub cached: bool,
    /// Why it does not compile.
    pub problem: Option<String>,
}

/// A launch of the forward pass.
pub struct Launch {
    /// Its place in the pass, from one.
    pub number: usize,
    /// Index into the inspection's kernels.
    pub kernel: usize,
    /// The symbol, or the kernel's name where several kernels have the symbol.
    pub label: String,
    pub step: Step,
    /// At each token count asked for.
    pub at: Vec<At>,
}

/// A launch at a token count.
#[derive(Clone, Copy, Debug)]
pub struct At {
    pub tokens: u64,
    pub grid: [u64; 2],
    pub work: Work,
    /// The least time on the machine, if its limits are known.
    pub least: Option<Least>,
}

/// The least time a launch can take.
#[derive(Clone, Copy, Debug)]
pub struct Least {
    pub seconds: f64,
    /// Arithmetic is what takes it, not memory.
    pub compute_bound: bool,
    /// The arithmetic rate it was held against, in FLOP/s.
    pub flops: f64,
}

impl Inspection {
    /// Plans, emits and compiles.
    pub fn new(request: Request<'_>) -> Result<Inspection> {
        let (plan, tuned) = plan(&request)?;
        let sources = emit_layer(&plan).map_err(EngineError::from)?;
        let chosen = choose(&sources, request.kernel)?;
        let (kernels, trouble) = compile(&request, &plan, &sources)?;
        let kernels: Vec<Kernel> = kernels
            .into_iter()
            .enumerate()
            .filter_map(|(i, kernel)| chosen.contains(&i).then_some(kernel))
            .collect();
        let launches = launches(&plan, &chosen, &request);
        Ok(Inspection {
            target: request.target,
            plan,
            tokens: request.tokens.to_vec(),
            machine: request.machine,
            kernels,
            launches,
            trouble,
            tuned,
            counted: None,
        })
    }

    /// What the binary says about a launch's entry.
    pub fn report(&self, launch: &Launch) -> Option<&KernelReport> {
        let artifact = self.kernels[launch.kernel].artifact.as_ref()?;
        artifact.report.kernel(&launch.step.symbol)
    }

    /// Whether a launch of this symbol is among those asked for.
    pub fn shows(&self, symbol: &str) -> bool {
        self.launches.iter().any(|l| l.step.symbol == symbol)
    }

    /// The entry of a launch.
    pub fn entry(&self, launch: &Launch) -> &moesaic::kernel::Entry {
        self.plan.entry(&launch.step)
    }
}

/// The plan that an engine of this machine would make.
fn plan(request: &Request<'_>) -> Result<(LayerPlan, Option<Tuned>)> {
    let options = EngineOptions::default();
    let here = match request.target {
        Target::Cpu(_) if options.tuned => CpuDevice::new().info().clone(),
        _ => {
            let plan = plan_for(request.spec, request.target, request.training);
            return Ok((plan.map_err(EngineError::from)?, None));
        }
    };
    let machine = cache::Machine {
        name: here.name,
        threads: here.units,
    };
    let untuned = Untuned::new(request.spec, request.target, request.training)?;
    Ok(match untuned.on(&request.store, &machine) {
        Some(found) => (found.plan, Some(found.tuned)),
        None => (untuned.plan, None),
    })
}

/// Indices of the kernels that a stem or name asks for.
fn choose(sources: &[KernelSource], wanted: Option<&str>) -> Result<Vec<usize>> {
    let Some(wanted) = wanted else {
        return Ok((0..sources.len()).collect());
    };
    let fits = |source: &KernelSource| source.name == wanted || source.stem.name() == wanted;
    let chosen: Vec<usize> = (0..sources.len()).filter(|&i| fits(&sources[i])).collect();
    match chosen.is_empty() {
        true => Err(unknown_kernel(sources, wanted)),
        false => Ok(chosen),
    }
}

fn unknown_kernel(sources: &[KernelSource], wanted: &str) -> Failure {
    let names: Vec<&str> = sources.iter().map(|source| source.name.as_str()).collect();
    let message = format!(
        "the layer has no kernel `{wanted}`\nits kernels: {}",
        names.join(", ")
    );
    let stems = Stem::all().map(|stem| -> &str { stem.name() });
    let known = names.iter().copied().chain(stems);
    let failure = Failure::input(message);
    match closest(wanted, known) {
        Some(near) if near != wanted => failure.hint(format!("did you mean `{near}`?")),
        _ => failure,
    }
}

/// Every kernel, compiled where that is possible.
fn compile(
    request: &Request<'_>,
    plan: &LayerPlan,
    sources: &[KernelSource],
) -> Result<(Vec<Kernel>, Option<String>)> {
    let compilers = Compilers::new(Some(request.store.clone()));
    let (rows, trouble) = match compilers.get(request.target) {
        Ok(compiler) => {
            let job = Job {
                spec: request.spec.clone(),
                target: request.target,
                training: request.training,
                tuning: plan.tuning.clone(),
                compiler,
            };
            let rows = precompile(&[job], &request.store, &CompileOptions::default(), &|_| {})?;
            (rows, None)
        }
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    let kernel = |source: &KernelSource| built(source, sources, &rows, &request.store);
    Ok((sources.iter().map(kernel).collect(), trouble))
}

fn built(source: &KernelSource, all: &[KernelSource], rows: &[Row], store: &Store) -> Kernel {
    // Kernels of the same text are compiled once, under the first name.
    let same = all.iter().filter(|other| other.text == source.text);
    let row = same
        .filter_map(|other| rows.iter().find(|row| row.kernel == other.name))
        .next();
    let mut kernel = Kernel {
        source: source.clone(),
        artifact: None,
        cached: false,
        problem: None,
    };
    match row.map(|row| (&row.outcome, row.key)) {
        None => {}
        Some((Outcome::Failed(error), _)) => kernel.problem = Some(error.to_string()),
        Some((Outcome::Hit(report, _) | Outcome::Compiled(report, _), key)) => {
            kernel.cached = matches!(row.map(|row| &row.outcome), Some(Outcome::Hit(..)));
            let stored = store.get(&key).map(|stored| stored.artifact);
            let report = || Artifact {
                binary: Vec::new(),
                report: report.clone(),
            };
            kernel.artifact = Some(stored.unwrap_or_else(report));
        }
    }
    kernel
}

fn launches(plan: &LayerPlan, chosen: &[usize], request: &Request<'_>) -> Vec<Launch> {
    let one = |(i, step): (usize, &Step)| {
        let kernel = chosen.iter().position(|&k| k == step.kernel)?;
        let at = |&tokens: &u64| at(plan, step, tokens, request.machine.as_ref());
        let at = request.tokens.iter().map(at).collect();
        Some(Launch {
            number: i + 1,
            kernel,
            label: label(plan, step),
            step: step.clone(),
            at,
        })
    };
    plan.all_steps().enumerate().filter_map(one).collect()
}

fn label(plan: &LayerPlan, step: &Step) -> String {
    let same = plan.all_steps().filter(|other| other.symbol == step.symbol);
    match same.count() {
        1 => step.symbol.clone(),
        _ => plan.kernels[step.kernel].name.clone(),
    }
}

fn at(plan: &LayerPlan, step: &Step, tokens: u64, machine: Option<&Machine>) -> At {
    let entry = plan.entry(step);
    let kernel = &plan.kernels[step.kernel];
    let work = Work::of(plan, step, tokens);
    let least = machine.map(|machine| {
        let flops = machine.flops(arithmetic(kernel, &plan.spec));
        let (seconds, compute_bound) = work.floor(flops, machine.bytes_per_second);
        Least {
            seconds,
            compute_bound,
            flops,
        }
    });
    let grid = [
        entry.launch.grid[0].eval(tokens),
        entry.launch.grid[1].eval(tokens),
    ];
    At {
        tokens,
        grid,
        work,
        least,
    }
}

/// The element type whose rate bounds a kernel: that of the expert weights
/// for their products, f32 for everything else.
pub fn arithmetic(kernel: &KernelPlan, spec: &LayerSpec) -> DType {
    match kernel.desc {
        KernelDesc::GroupedGemm(_)
        | KernelDesc::GroupedGemmDgrad(_)
        | KernelDesc::GroupedGemmWgrad(_) => spec.precision.weights,
        _ => DType::F32,
    }
}
