//! Everything an inspection shows, as data.

use super::counted::Counted;
use crate::failure::{Failure, Result};
use crate::machine::Machine;
use crate::suggest::closest;
use moesaic::aot::{Job, Outcome, Row, precompile};
use moesaic::cache::{self, Tuned};
use moesaic::cpu::CpuDevice;
use moesaic::emit::emit_layer;
use moesaic::engine::Untuned;
use moesaic::kernel::{Entry, KernelSource, Stem};
use moesaic::plan::{EntryId, KernelPlan, LayerPlan, Step, Tilings, Work, plan};
use moesaic::target::{Artifact, CompileOptions, Device, KernelReport};
use moesaic::{
    Compilers, DType, EngineError, EngineOptions, LayerSpec, PlanOptions, Store, Target,
};
use std::sync::Arc;

/// What is asked for.
pub struct Request<'a> {
    pub spec: &'a LayerSpec,
    pub target: Target,
    pub options: PlanOptions,
    pub tokens: &'a [u64],
    pub kernel: Option<&'a str>,
    pub machine: Option<Machine>,
    pub store: Arc<Store>,
}

/// A layer on a target.
pub struct Inspection {
    pub target: Target,
    /// Without sizes of a tuning.
    pub plan: LayerPlan,
    pub tokens: Vec<u64>,
    pub machine: Option<Machine>,
    /// Those of the plan, then those that numbers of tokens have instead.
    pub kernels: Vec<Kernel>,
    pub launches: Vec<Launch>,
    /// Why nothing was compiled.
    pub trouble: Option<String>,
    /// What was measured to be best here, if it was.
    pub tuned: Option<Tuned>,
    /// What a simulator counted, when it was asked to.
    pub counted: Option<Counted>,
}

/// A kernel source and what its binary says.
pub struct Kernel {
    /// Index into the plan's kernels.
    pub of: usize,
    /// The measured numbers of tokens that it is for; none: all that have no
    /// other.
    pub tokens: Vec<usize>,
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
    /// What it launches.
    pub entry: EntryId,
    /// At each token count asked for.
    pub at: Vec<At>,
}

/// A launch at a token count.
#[derive(Clone, Copy, Debug)]
pub struct At {
    pub tokens: u64,
    pub grid: [u64; 2],
    pub work: Work,
    /// The roofline on the machine, if the limits of the machine are known.
    pub roofline: Option<Roofline>,
}

/// The roofline of a launch: the shortest time that the machine allows for it.
#[derive(Clone, Copy, Debug)]
pub struct Roofline {
    pub seconds: f64,
    /// Arithmetic is what takes it, not memory.
    pub compute_bound: bool,
    /// The arithmetic rate it was held against, in FLOP/s.
    pub flops: f64,
}

impl Inspection {
    /// Plans, emits and compiles.
    pub fn new(request: Request<'_>) -> Result<Inspection> {
        let (tilings, tuned) = tilings(&request)?;
        let chosen = choose(&tilings.first().kernels, request.kernel)?;
        let (kernels, trouble) = kernels(&request, &tilings, &chosen)?;
        let launches = launches(&tilings, &chosen, &request);
        Ok(Inspection {
            target: request.target,
            plan: tilings.first().clone(),
            tokens: request.tokens.to_vec(),
            machine: request.machine,
            kernels,
            launches,
            trouble,
            tuned,
            counted: None,
        })
    }

    /// Each launch with its kernel, and with those that numbers of tokens have
    /// instead.
    pub fn launched(&self) -> impl Iterator<Item = (&Launch, &Kernel)> {
        let own = |launch: &Launch, kernel: &&Kernel| kernel.of == launch.entry.kernel;
        let each = self.launches.iter();
        each.flat_map(move |launch| {
            let kernels = self
                .kernels
                .iter()
                .filter(move |kernel| own(launch, kernel));
            kernels.map(move |kernel| (launch, kernel))
        })
    }

    /// Whether a launch of this symbol is among those asked for.
    pub fn shows(&self, symbol: &str) -> bool {
        self.launches.iter().any(|l| self.entry(l).symbol == symbol)
    }

    /// The launch of this symbol that has blocks in a call of so many tokens, if it is one.
    pub fn only(&self, symbol: &str, tokens: u64) -> Option<&Launch> {
        let has_blocks = |launch: &&Launch| {
            let entry = self.entry(launch);
            entry.symbol == symbol && entry.launch.blocks(tokens) > 0
        };
        let mut launches = self.launches.iter().filter(has_blocks);
        launches.next().filter(|_| launches.next().is_none())
    }

    /// The entry of a launch.
    pub fn entry(&self, launch: &Launch) -> &Entry {
        &self.plan[launch.entry]
    }
}

impl Kernel {
    /// What the binary says about a launch's entry.
    pub fn report(&self, launch: &Launch) -> Option<&KernelReport> {
        let artifact = self.artifact.as_ref()?;
        artifact.report.kernel(&self.entry(launch).symbol)
    }

    /// The entry of a launch.
    pub fn entry(&self, launch: &Launch) -> &Entry {
        &self.source.entries[launch.entry.entry]
    }

    /// Its name in links.
    pub fn anchor(&self) -> String {
        let tokens = self.tokens.iter().map(|tokens| format!("-{tokens}"));
        format!("kernel-{}{}", self.source.name, tokens.collect::<String>())
    }

    /// A name of its or a launch's, and the numbers of tokens that it is for.
    pub fn label(&self, name: &str) -> String {
        let tokens: Vec<String> = self.tokens.iter().map(usize::to_string).collect();
        if tokens.is_empty() {
            name.to_string()
        } else {
            format!("{name}, T={}", tokens.join(","))
        }
    }
}

/// The plans that an engine of this machine would make.
fn tilings(request: &Request<'_>) -> Result<(Tilings, Option<Tuned>)> {
    let plan = plan(request.spec, request.target, &request.options);
    let plan = plan.map_err(EngineError::from)?;
    let here = match request.target {
        Target::Cpu(_) if EngineOptions::default().tuned => CpuDevice::new().info().clone(),
        _ => return Ok((plan.into(), None)),
    };
    let machine = cache::TunedMachine {
        name: here.name,
        threads: here.units,
    };
    let untuned = Untuned::new(plan);
    Ok(match untuned.on(&request.store, &machine) {
        Some(found) => (found.tilings, Some(found.tuned)),
        None => (untuned.plan.into(), None),
    })
}

/// Indices of the kernels that a stem or name asks for.
fn choose(kernels: &[KernelPlan], wanted: Option<&str>) -> Result<Vec<usize>> {
    let Some(wanted) = wanted else {
        return Ok((0..kernels.len()).collect());
    };
    let fits = |kernel: &KernelPlan| kernel.name == wanted || kernel.stem().name() == wanted;
    let chosen: Vec<usize> = (0..kernels.len()).filter(|&i| fits(&kernels[i])).collect();
    if chosen.is_empty() {
        let names: Vec<&str> = kernels.iter().map(|kernel| kernel.name.as_str()).collect();
        Err(unknown_kernel(&names, wanted))
    } else {
        Ok(chosen)
    }
}

/// None of the kernels of these names was meant.
pub fn unknown_kernel(names: &[&str], wanted: &str) -> Failure {
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

/// The chosen kernels of the first plan, then those that other plans have
/// instead, and why nothing was compiled.
fn kernels(
    request: &Request<'_>,
    tilings: &Tilings,
    chosen: &[usize],
) -> Result<(Vec<Kernel>, Option<String>)> {
    let mut kernels: Vec<Kernel> = Vec::new();
    let mut trouble = None;
    for plan in tilings.plans() {
        let (own, why) = compile(request, plan)?;
        trouble = trouble.or(why);
        for kernel in own.into_iter().filter(|kernel| chosen.contains(&kernel.of)) {
            let same = |k: &&mut Kernel| k.of == kernel.of && k.source.text == kernel.source.text;
            let tokens = tokens_of(tilings, plan);
            match kernels.iter_mut().find(same) {
                Some(same) if same.tokens.is_empty() => {}
                Some(same) => same.tokens.extend(tokens),
                None => kernels.push(Kernel { tokens, ..kernel }),
            }
        }
    }
    Ok((kernels, trouble))
}

/// The measured numbers of tokens that a plan other than the first is for.
fn tokens_of(tilings: &Tilings, plan: &LayerPlan) -> Vec<usize> {
    let buckets = tilings.buckets().filter(|_| plan != tilings.first());
    let own = buckets.filter(|(_, other)| *other == plan);
    own.map(|(tokens, _)| tokens).collect()
}

/// Every kernel, compiled where that is possible.
fn compile(request: &Request<'_>, plan: &LayerPlan) -> Result<(Vec<Kernel>, Option<String>)> {
    let sources = &emit_layer(plan).map_err(EngineError::from)?;
    let compilers = Compilers::new(Some(request.store.clone()));
    let (rows, trouble) = match compilers.get(request.target) {
        Ok(compiler) => {
            let job = Job {
                spec: request.spec.clone(),
                target: request.target,
                options: PlanOptions {
                    tuning: plan.tuning.clone(),
                    ..request.options.clone()
                },
                mesh: None,
                compiler,
            };
            let rows = precompile(&[job], &request.store, &CompileOptions::default(), &|_| {})?;
            (rows, None)
        }
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    let kernel = |of| built(of, sources, &rows, &request.store);
    Ok(((0..sources.len()).map(kernel).collect(), trouble))
}

fn built(of: usize, all: &[KernelSource], rows: &[Row], store: &Store) -> Kernel {
    let source = &all[of];
    // Kernels of the same text are compiled once, under the first name.
    let same = all.iter().filter(|other| other.text == source.text);
    let row = same
        .filter_map(|other| rows.iter().find(|row| row.kernel == other.name))
        .next();
    let mut kernel = Kernel {
        of,
        tokens: Vec::new(),
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

fn launches(tilings: &Tilings, chosen: &[usize], request: &Request<'_>) -> Vec<Launch> {
    let plan = tilings.first();
    let one = |(i, step): (usize, &Step)| {
        let Step::Launch(launch) = step;
        let kernel = chosen.iter().position(|&k| k == launch.entry.kernel)?;
        let at = |&tokens: &u64| {
            let plan = tilings.at(tokens as usize);
            at(plan, step, tokens, request.machine.as_ref())
        };
        let at = request.tokens.iter().map(at).collect();
        Some(Launch {
            number: i + 1,
            kernel,
            label: plan.label(step).to_string(),
            step: step.clone(),
            entry: launch.entry,
            at,
        })
    };
    plan.all_steps().enumerate().filter_map(one).collect()
}

fn at(plan: &LayerPlan, step: &Step, tokens: u64, machine: Option<&Machine>) -> At {
    let Step::Launch(launch) = step;
    let (entry, kernel) = (&plan[launch.entry], &plan.kernels[launch.entry.kernel]);
    let work = Work::of(plan, step, tokens);
    let roofline = machine.map(|machine| {
        let flops = machine.flops(arithmetic(kernel, &plan.spec));
        let (seconds, compute_bound) = work.floor(flops, machine.bytes_per_second);
        Roofline {
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
        roofline,
    }
}

/// The element type whose rate bounds a kernel: that of the expert weights
/// for their products, f32 for everything else.
pub fn arithmetic(kernel: &KernelPlan, spec: &LayerSpec) -> DType {
    match kernel.op.gemm() {
        Some(_) => spec.precision.weights,
        None => DType::F32,
    }
}
