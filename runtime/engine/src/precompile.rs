//! Filling a store for targets that need not be present: what a cluster's
//! login node does.

use crate::error::EngineError;
use crate::jit::Builder;
use crate::layer::check_spec;
use crate::parallel::{cores, parallel_on};
use moesaic_cache::{Key, Store};
use moesaic_collectives::nccl::Kernels;
use moesaic_emit::emit_layer;
use moesaic_kernel::{KernelSource, Target};
use moesaic_plan::{Parallel, Place, PlanError, PlanOptions, Ways, plan, plan_ways};
use moesaic_spec::LayerSpec;
use moesaic_target::{CompileOptions, Compiler, Report};
use std::collections::HashSet;
use std::sync::Arc;

/// One layer for one target.
pub struct Job {
    /// The layer.
    pub spec: LayerSpec,
    /// The target.
    pub target: Target,
    /// What its plan follows: training or inference, sizes, caches.
    pub options: PlanOptions,
    /// How ranks share it: the kernels of all of them instead of one process's. With
    /// [`PlanOptions::unpacked`] those for every number of ways.
    pub mesh: Option<Parallel>,
    /// A compiler for it.
    pub compiler: Arc<dyn Compiler>,
}

/// What happened to one kernel.
#[derive(Debug)]
pub struct Row {
    /// The layer's name.
    pub layer: String,
    /// The kernel's name.
    pub kernel: String,
    /// The target.
    pub target: Target,
    /// The kernel's key in the store.
    pub key: Key,
    /// How it went.
    pub outcome: Outcome,
}

/// How one kernel went.
#[derive(Debug)]
pub enum Outcome {
    /// It was in the store already.
    Hit(Report, u64),
    /// It was compiled; the report, and the bytes of the binary.
    Compiled(Report, u64),
    /// It could not be compiled.
    Failed(EngineError),
}

/// Progress of [`precompile`].
#[derive(Debug)]
pub enum Event<'a> {
    /// So many kernels are to be looked at.
    Start(usize),
    /// One is done.
    Done(&'a Row),
}

/// Compiles every kernel of every job into `store`, on all cores. Kernels
/// that several jobs share are compiled once and listed once. A kernel that
/// fails does not stop the others.
///
/// # Errors
/// When a spec is invalid or cannot be planned or emitted; nothing has been
/// compiled then.
pub fn precompile(
    jobs: &[Job],
    store: &Arc<Store>,
    options: &CompileOptions,
    progress: &(dyn Fn(Event<'_>) + Sync),
) -> Result<Vec<Row>, EngineError> {
    precompile_on(cores(), jobs, store, options, progress)
}

/// As [`precompile`], with at most `threads` compiles at the same time.
///
/// # Errors
/// As [`precompile`].
pub fn precompile_on(
    threads: usize,
    jobs: &[Job],
    store: &Arc<Store>,
    options: &CompileOptions,
    progress: &(dyn Fn(Event<'_>) + Sync),
) -> Result<Vec<Row>, EngineError> {
    let mut seen = HashSet::new();
    let mut kernels: Vec<(&Job, KernelSource, Key, Builder)> = Vec::new();
    for job in jobs {
        check_spec(&job.spec)?;
        for source in sources(job)? {
            let compiler = Some(job.compiler.clone());
            let builder = Builder::new(compiler, Some(store.clone()), options.clone());
            let key = builder.key(&source, &builder.fingerprint(job.target));
            if seen.insert(key) {
                kernels.push((job, source, key, builder));
            }
        }
    }
    progress(Event::Start(kernels.len()));
    Ok(parallel_on(
        threads,
        &kernels,
        |(job, source, key, builder)| {
            let row = Row {
                layer: job.spec.name.clone(),
                kernel: source.name.clone(),
                target: job.target,
                key: *key,
                outcome: outcome(builder, source, key),
            };
            progress(Event::Done(&row));
            row
        },
    ))
}

/// The kernels of a job; some more than once.
fn sources(job: &Job) -> Result<Vec<KernelSource>, EngineError> {
    let (spec, target, options) = (&job.spec, job.target, &job.options);
    let Some(mesh) = job.mesh else {
        return Ok(emit_layer(&plan(spec, target, options)?)?);
    };
    mesh.check(spec).map_err(PlanError::from)?;
    // Ranks differ in how many experts they have: the first have the most, the last the
    // fewest. Slices are equal.
    let last = mesh.ep - 1;
    let ways = match options.unpacked {
        true => Ways::all(mesh),
        false => vec![mesh.shards],
    };
    let mut all = Vec::new();
    for ep in if last > 0 { vec![0, last] } else { vec![0] } {
        let (dp, shard) = (0, 0);
        let rank = mesh.rank(Place { dp, ep, shard });
        for &ways in &ways {
            let plan = plan_ways(spec, target, options, (mesh, ways), rank)?;
            for side in plan.sides() {
                all.extend(emit_layer(side)?);
            }
        }
    }
    // Ranks with GPUs add up by a kernel.
    all.extend(Kernels::source(target));
    Ok(all)
}

fn outcome(builder: &Builder, source: &KernelSource, key: &Key) -> Outcome {
    match builder.build(source, key) {
        Ok((artifact, compiled)) => {
            let bytes = artifact.binary.len() as u64;
            match compiled {
                true => Outcome::Compiled(artifact.report, bytes),
                false => Outcome::Hit(artifact.report, bytes),
            }
        }
        Err(error) => Outcome::Failed(error),
    }
}
