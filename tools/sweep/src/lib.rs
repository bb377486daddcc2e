//! Compiles random layers, forward and training, to binaries for GPUs: every
//! valid layer compiles for every target, and no kernel spills.

mod draw;
mod table;

pub use draw::{layer, products};
pub use table::Table;

use moesaic_emit::emit;
use moesaic_kernel::{KernelSource, Target};
use moesaic_plan::{KernelPlan, PlanOptions, Training, plan};
use moesaic_spec::LayerSpec;
use moesaic_target::{ArtifactReport, CompileOptions, Compiler, KernelReport};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The settings of a sweep.
#[derive(Clone, Debug)]
pub struct Sweep {
    /// First seed; the others follow it.
    pub seed: u64,
    /// Largest number of layers.
    pub specs: u64,
    /// Function that draws the layer of a seed: [`layer`] or [`products`].
    pub draw: fn(u64) -> LayerSpec,
    /// Targets to compile for.
    pub targets: Vec<Target>,
    /// Number of targets of each layer, drawn from these.
    pub each: usize,
    /// Number of kernels of each layer, drawn; `None` takes all.
    pub kernels: Option<usize>,
    /// Beginning of the names of kernels to compile.
    pub only: String,
    /// Text that a kernel must contain.
    pub with: String,
    /// Time after which no layer is begun.
    pub limit: Option<Duration>,
    /// Number of simultaneous compiles.
    pub threads: usize,
}

/// A kernel that does not compile, or compiles with a complaint.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Seed that draws the layer again.
    pub seed: u64,
    /// Target of the compile.
    pub target: Target,
    /// The complaint.
    pub reason: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Failure {
            seed,
            target,
            reason,
        } = self;
        write!(f, "--seed {seed} --specs 1 --target {target}: {reason}")
    }
}

/// The state that threads share.
struct State<'a> {
    next: u64,
    seen: BTreeSet<(Target, String)>,
    table: Table,
    failed: &'a mut (dyn FnMut(&Failure) + Send),
}

impl Sweep {
    /// Calls `found` for each kernel that [`Sweep::run`] compiles, layer by
    /// layer.
    pub fn list(&self, found: &mut dyn FnMut(u64, Target, &KernelSource)) {
        let mut seen = BTreeSet::new();
        for seed in self.seed..self.seed + self.specs {
            for target in draw::targets(seed, &self.targets, self.each) {
                for (_, source) in self.kernels(seed, target).into_iter().flatten() {
                    if self.wants(&source) && seen.insert((target, source.text.clone())) {
                        found(seed, target, &source);
                    }
                }
            }
        }
    }

    /// Returns the kernels of a layer's inference and training, with their
    /// families.
    fn kernels(&self, seed: u64, target: Target) -> Vec<Result<(String, KernelSource), String>> {
        let spec = (self.draw)(seed);
        let plans = [
            plan(&spec, target, &PlanOptions::default()),
            plan(&spec, target, &PlanOptions::training(Training::default())),
        ];
        let (mut all, mut failed) = (Vec::new(), Vec::new());
        for plan in &plans {
            match plan {
                Ok(plan) => all.extend(&plan.kernels),
                Err(error) => failed.push(Err(format!("the plan: {error}"))),
            }
        }
        let source = |kernel: &KernelPlan| {
            let source = emit(kernel, target).map_err(|error| error.to_string())?;
            Ok((family(kernel), source))
        };
        let some = draw::some(seed, all, self.kernels);
        let made = some.into_iter().map(source);
        failed.into_iter().chain(made).collect()
    }

    fn wants(&self, source: &KernelSource) -> bool {
        source.name.starts_with(&self.only) && source.text.contains(&self.with)
    }

    /// Compiles, and calls `failed` for each failure as it happens.
    pub fn run(
        &self,
        compilers: &[&dyn Compiler],
        failed: &mut (dyn FnMut(&Failure) + Send),
    ) -> Table {
        let started = Instant::now();
        let state = Mutex::new(State {
            next: 0,
            seen: BTreeSet::new(),
            table: Table::default(),
            failed,
        });
        std::thread::scope(|scope| {
            for _ in 0..self.threads.max(1) {
                scope.spawn(|| {
                    while let Some(seed) = self.next(&state, started) {
                        self.layer(seed, compilers, &state);
                    }
                });
            }
        });
        let state = state.into_inner().unwrap_or_else(|e| e.into_inner());
        state.table
    }

    fn next(&self, state: &Mutex<State>, started: Instant) -> Option<u64> {
        let late = self.limit.is_some_and(|limit| started.elapsed() > limit);
        let mut state = lock(state);
        if late || state.next == self.specs {
            return None;
        }
        state.next += 1;
        state.table.layers += 1;
        Some(self.seed + state.next - 1)
    }

    fn layer(&self, seed: u64, compilers: &[&dyn Compiler], state: &Mutex<State>) {
        for target in draw::targets(seed, &self.targets, self.each) {
            let compiler = compilers.iter().find(|c| c.targets().contains(&target));
            let compiler = compiler.expect("targets are those of the compilers");
            for kernel in self.kernels(seed, target) {
                let outcome = kernel.and_then(|(family, source)| {
                    let text = (target, source.text.clone());
                    if !self.wants(&source) || !lock(state).seen.insert(text) {
                        return Ok(None);
                    }
                    let report = compile(*compiler, &source)?;
                    Ok(Some((family, source, report)))
                });
                let mut state = lock(state);
                match outcome {
                    Ok(None) => {}
                    Ok(Some((family, source, report))) => {
                        state.table.add(target, &family, &source, &report);
                    }
                    Err(reason) => {
                        state.table.failures += 1;
                        (state.failed)(&Failure {
                            seed,
                            target,
                            reason,
                        });
                    }
                }
            }
        }
    }
}

fn lock<'a, 'b>(state: &'a Mutex<State<'b>>) -> std::sync::MutexGuard<'a, State<'b>> {
    state.lock().unwrap_or_else(|e| e.into_inner())
}

/// Returns the stem, and for GEMMs the unit that multiplies.
fn family(kernel: &KernelPlan) -> String {
    match kernel.family() {
        Some(family) if family != "simt" => format!("{} {family}", kernel.stem()),
        _ => kernel.stem().to_string(),
    }
}

/// Compiles, and returns an error if the compiler complains.
fn compile(compiler: &dyn Compiler, source: &KernelSource) -> Result<ArtifactReport, String> {
    let artifact = compiler.compile(source, &CompileOptions::default());
    let report = artifact.map_err(|error| describe(source, &error))?.report;
    match report.kernels.iter().find_map(fault) {
        Some(fault) => Err(format!("{fault} [{}]", source.config)),
        None if report.log.is_empty() => Ok(report),
        None => Err(format!("`{}`: {}", source.name, report.log)),
    }
}

/// Describes the registers that a kernel keeps in memory.
fn fault(kernel: &KernelReport) -> Option<String> {
    let symbol = &kernel.symbol;
    match kernel.scalar_spills {
        _ if kernel.stack_bytes.unwrap_or(0) > 0 => Some(format!("`{symbol}` has a stack")),
        Some(spills) if spills > 0 => Some(format!("`{symbol}` spills {spills} scalar registers")),
        _ if kernel.spills() => Some(format!("`{symbol}` spills")),
        _ => None,
    }
}

/// Formats the error, and for a GEMM its tiles.
fn describe(source: &KernelSource, error: &dyn std::error::Error) -> String {
    let mut text = error.to_string().replace('\n', " ");
    let _ = write!(text, " [{}]", source.config);
    text
}
