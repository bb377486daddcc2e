//! The data that an inspection shows.

use super::counted::Counted;
use crate::failure::{Failure, Result};
use crate::machine::MachineLimits;
use crate::suggest::closest;
use moesaic::aot::{KernelOutcome, KernelRow, PrecompileJob, precompile};
use moesaic::cache::{self, Tuned};
use moesaic::cpu::CpuDevice;
use moesaic::emit::emit_layer;
use moesaic::engine::Untuned;
use moesaic::kernel::{Entry, KernelSource, Stem};
use moesaic::plan::{Bound, EntryId, Floor, KernelPlan, LayerPlan, Step, Tilings, Work, plan};
use moesaic::target::{Artifact, CompileOptions, Device, KernelReport};
use moesaic::{
    Compilers, DType, EngineError, EngineOptions, LayerSpec, PlanOptions, Store, Target,
};
use std::sync::Arc;

/// The request for an inspection.
pub struct InspectRequest<'a> {
    pub spec: &'a LayerSpec,
    pub target: Target,
    pub options: PlanOptions,
    pub tokens: &'a [u64],
    pub kernel: Option<&'a str>,
    pub machine: Option<MachineLimits>,
    pub store: Arc<Store>,
}

/// The inspection of a layer on a target.
pub struct Inspection {
    pub target: Target,
    /// The plan with the default tile sizes, without a tuning.
    pub plan: LayerPlan,
    pub tokens: Vec<u64>,
    pub machine: Option<MachineLimits>,
    /// The kernels of the plan, then those that a tuning uses instead for some numbers of tokens.
    pub kernels: Vec<InspectedKernel>,
    pub launches: Vec<InspectedLaunch>,
    /// The reason why nothing was compiled.
    pub trouble: Option<String>,
    /// The cached tuning of the layer for this machine.
    pub tuned: Option<Tuned>,
    /// The counts of a simulator, if they were requested.
    pub counted: Option<Counted>,
}

/// A kernel's source and the facts of its binary.
pub struct InspectedKernel {
    /// The index into the plan's kernels.
    pub of: usize,
    /// The measured numbers of tokens that the kernel is for; empty for a kernel that serves all
    /// other numbers.
    pub tokens: Vec<usize>,
    pub source: KernelSource,
    /// The binary; `None` if it was not compiled.
    pub artifact: Option<Artifact>,
    /// Whether the binary came from the cache.
    pub cached: bool,
    /// The reason why the kernel does not compile.
    pub problem: Option<String>,
}

/// A launch of a pass.
pub struct InspectedLaunch {
    /// The position in the pass, from one.
    pub number: usize,
    /// The index into the inspection's kernels.
    pub kernel: usize,
    /// The symbol, or the kernel's name if several kernels share the symbol.
    pub label: String,
    pub step: Step,
    /// The entry that is launched.
    pub entry: EntryId,
    /// The work at each requested token count.
    pub at: Vec<LaunchSize>,
}

/// A launch at one token count.
#[derive(Clone, Copy, Debug)]
pub struct LaunchSize {
    pub tokens: u64,
    pub grid: [u64; 2],
    pub work: Work,
    /// The roofline, if the machine's limits are known.
    pub roofline: Option<Roofline>,
}

/// The roofline of a launch: the shortest time that the machine allows for it.
#[derive(Clone, Copy, Debug)]
pub struct Roofline {
    pub seconds: f64,
    /// The limit that sets it.
    pub bound: Bound,
}

impl Inspection {
    /// Plans, emits and compiles the layer.
    pub fn new(request: InspectRequest<'_>) -> Result<Inspection> {
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

    /// Returns each launch with its kernel, and with the kernels that a tuning uses instead.
    pub fn launched(&self) -> impl Iterator<Item = (&InspectedLaunch, &InspectedKernel)> {
        let own =
            |launch: &InspectedLaunch, kernel: &&InspectedKernel| kernel.of == launch.entry.kernel;
        let each = self.launches.iter();
        each.flat_map(move |launch| {
            let kernels = self
                .kernels
                .iter()
                .filter(move |kernel| own(launch, kernel));
            kernels.map(move |kernel| (launch, kernel))
        })
    }

    /// Returns whether a launch of this symbol was requested.
    pub fn shows(&self, symbol: &str) -> bool {
        self.launches.iter().any(|l| self.entry(l).symbol == symbol)
    }

    /// Returns the launch of this symbol that has blocks in a call of `tokens` tokens, if it is the
    /// only one.
    pub fn only(&self, symbol: &str, tokens: u64) -> Option<&InspectedLaunch> {
        let has_blocks = |launch: &&InspectedLaunch| {
            let entry = self.entry(launch);
            entry.symbol == symbol && entry.launch.blocks(tokens) > 0
        };
        let mut launches = self.launches.iter().filter(has_blocks);
        launches.next().filter(|_| launches.next().is_none())
    }

    /// Returns the entry of a launch.
    pub fn entry(&self, launch: &InspectedLaunch) -> &Entry {
        &self.plan[launch.entry]
    }
}

impl InspectedKernel {
    /// Returns the facts that the binary reports about a launch's entry.
    pub fn report(&self, launch: &InspectedLaunch) -> Option<&KernelReport> {
        let artifact = self.artifact.as_ref()?;
        artifact.report.kernel(&self.entry(launch).symbol)
    }

    /// Returns the entry of a launch.
    pub fn entry(&self, launch: &InspectedLaunch) -> &Entry {
        &self.source.entries[launch.entry.entry]
    }

    /// Returns the kernel's name in links.
    pub fn anchor(&self) -> String {
        let tokens = self.tokens.iter().map(|tokens| format!("-{tokens}"));
        format!("kernel-{}{}", self.source.name, tokens.collect::<String>())
    }

    /// Returns `name` with the numbers of tokens that the kernel is for.
    pub fn label(&self, name: &str) -> String {
        let tokens: Vec<String> = self.tokens.iter().map(usize::to_string).collect();
        if tokens.is_empty() {
            name.to_string()
        } else {
            format!("{name}, T={}", tokens.join(","))
        }
    }
}

/// Returns the plans that an engine on this machine would make.
fn tilings(request: &InspectRequest<'_>) -> Result<(Tilings, Option<Tuned>)> {
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

/// Returns the indices of the kernels that match a stem or name.
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

/// Returns the failure for a name that matches no kernel.
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

/// Returns the chosen kernels of the first plan, then those that other plans use instead, and the
/// reason why nothing was compiled.
fn kernels(
    request: &InspectRequest<'_>,
    tilings: &Tilings,
    chosen: &[usize],
) -> Result<(Vec<InspectedKernel>, Option<String>)> {
    let mut kernels: Vec<InspectedKernel> = Vec::new();
    let mut trouble = None;
    for plan in tilings.plans() {
        let (own, why) = compile(request, plan)?;
        trouble = trouble.or(why);
        for kernel in own.into_iter().filter(|kernel| chosen.contains(&kernel.of)) {
            let same =
                |k: &&mut InspectedKernel| k.of == kernel.of && k.source.text == kernel.source.text;
            let tokens = tokens_of(tilings, plan);
            match kernels.iter_mut().find(same) {
                Some(same) if same.tokens.is_empty() => {}
                Some(same) => same.tokens.extend(tokens),
                None => kernels.push(InspectedKernel { tokens, ..kernel }),
            }
        }
    }
    Ok((kernels, trouble))
}

/// Returns the measured numbers of tokens for which a plan replaces the first one.
fn tokens_of(tilings: &Tilings, plan: &LayerPlan) -> Vec<usize> {
    let buckets = tilings.buckets().filter(|_| plan != tilings.first());
    let own = buckets.filter(|(_, other)| *other == plan);
    own.map(|(tokens, _)| tokens).collect()
}

/// Returns every kernel of a plan, compiled if that is possible.
fn compile(
    request: &InspectRequest<'_>,
    plan: &LayerPlan,
) -> Result<(Vec<InspectedKernel>, Option<String>)> {
    let sources = &emit_layer(plan).map_err(EngineError::from)?;
    let compilers = Compilers::new(Some(request.store.clone()));
    let (rows, trouble) = match compilers.get(request.target) {
        Ok(compiler) => {
            let job = PrecompileJob {
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

fn built(of: usize, all: &[KernelSource], rows: &[KernelRow], store: &Store) -> InspectedKernel {
    let source = &all[of];
    // Kernels of the same text are compiled once, under the first name.
    let same = all.iter().filter(|other| other.text == source.text);
    let row = same
        .filter_map(|other| rows.iter().find(|row| row.kernel == other.name))
        .next();
    let mut kernel = InspectedKernel {
        of,
        tokens: Vec::new(),
        source: source.clone(),
        artifact: None,
        cached: false,
        problem: None,
    };
    match row.map(|row| (&row.outcome, row.key)) {
        None => {}
        Some((KernelOutcome::Failed(error), _)) => kernel.problem = Some(error.to_string()),
        Some((KernelOutcome::Hit(report, _) | KernelOutcome::Compiled(report, _), key)) => {
            kernel.cached = matches!(row.map(|row| &row.outcome), Some(KernelOutcome::Hit(..)));
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

fn launches(
    tilings: &Tilings,
    chosen: &[usize],
    request: &InspectRequest<'_>,
) -> Vec<InspectedLaunch> {
    let plan = tilings.first();
    let one = |(i, step): (usize, &Step)| {
        let Step::Launch(launch) = step;
        let kernel = chosen.iter().position(|&k| k == launch.entry.kernel)?;
        let at = |&tokens: &u64| {
            let plan = tilings.at(tokens as usize);
            at(plan, step, tokens, request.machine.as_ref())
        };
        let at = request.tokens.iter().map(at).collect();
        Some(InspectedLaunch {
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

fn at(plan: &LayerPlan, step: &Step, tokens: u64, machine: Option<&MachineLimits>) -> LaunchSize {
    let Step::Launch(launch) = step;
    let (entry, kernel) = (&plan[launch.entry], &plan.kernels[launch.entry.kernel]);
    let work = Work::of(plan, step, tokens);
    let roofline = machine.map(|machine| {
        let roofs = machine.roofs(arithmetic(kernel, &plan.spec));
        let Floor { seconds, bound } = work.floor(&roofs);
        Roofline { seconds, bound }
    });
    let grid = [
        entry.launch.grid[0].eval(tokens),
        entry.launch.grid[1].eval(tokens),
    ];
    LaunchSize {
        tokens,
        grid,
        work,
        roofline,
    }
}

/// Returns the element type whose rate bounds a kernel: the type of the expert weights for the
/// kernels that multiply them, f32 for all others.
pub fn arithmetic(kernel: &KernelPlan, spec: &LayerSpec) -> DType {
    match kernel.op.gemm() {
        Some(_) => spec.precision.weights,
        None => DType::F32,
    }
}
