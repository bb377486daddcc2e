//! Precompilation: filling a store for targets that need not be present, as on a cluster's login
//! node.

use crate::device_layer::check_spec;
use crate::error::EngineError;
use crate::jit::{Builder, Built};
use crate::parallel::{cores, parallel_on};
use moesaic_cache::{KernelKey, Store};
use moesaic_collectives::nccl::Kernels;
use moesaic_emit::emit_layer;
use moesaic_kernel::{KernelSource, Target};
use moesaic_plan::{AdaptiveMesh, CommDtype, plan, plan_rank, stacked};
use moesaic_plan::{
    Both, Parallel, Placement, PlanError, PlanOptions, RankCoords, Sharing, Strategy,
};
use moesaic_spec::LayerSpec;
use moesaic_target::{Artifact, ArtifactReport, CompileOptions, Compiler};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

/// One layer for one target.
#[derive(Debug)]
pub struct PrecompileJob {
    /// The layer.
    pub spec: LayerSpec,
    /// The target.
    pub target: Target,
    /// The options of its plan: training or inference, sizes, caches.
    pub options: PlanOptions,
    /// The ranks that share it: compiles the kernels of all ranks instead of one process's.
    pub mesh: Option<MeshJob>,
    /// A compiler for it.
    pub compiler: Arc<dyn Compiler>,
}

impl PrecompileJob {
    /// Returns the job for the kernels with which a [`MultiGate`](crate::MultiGate) of the layer
    /// runs all routers in one pass over the experts, in addition to the layer's own kernels.
    /// `None` if it runs them one by one, and over ranks.
    pub fn multi_gate(&self) -> Option<PrecompileJob> {
        let experts = stacked(&self.spec).filter(|_| self.mesh.is_none())?;
        Some(PrecompileJob {
            spec: experts,
            target: self.target,
            options: self.options.clone(),
            mesh: None,
            compiler: Arc::clone(&self.compiler),
        })
    }
}

/// The ranks that share a layer, and their strategies.
#[derive(Clone, Debug)]
pub struct MeshJob {
    /// The mesh.
    pub parallel: Parallel,
    /// The placements of experts; empty means contiguous. Kernels only depend on the number of
    /// experts that a rank has, so one placement stands for all with the same numbers.
    pub placements: Vec<Placement>,
    /// The strategies in addition to the default. On a CPU a layer for inference may use other
    /// adaptive parallelism degrees with [`PlanOptions::unpacked`].
    pub strategies: Vec<Strategy>,
}

impl From<Parallel> for MeshJob {
    /// Returns the job with the default strategy alone.
    fn from(parallel: Parallel) -> MeshJob {
        MeshJob {
            parallel,
            placements: Vec::new(),
            strategies: Vec::new(),
        }
    }
}

impl MeshJob {
    /// Returns the job with every adaptive parallelism degree, and any of these communication
    /// dtypes.
    pub fn for_any_r(parallel: Parallel, comm_dtypes: &[Both<CommDtype>]) -> MeshJob {
        let comm_dtypes = [&[Both::same(CommDtype::Unchanged)], comm_dtypes].concat();
        let strategy = |adaptive_r, comm_dtype: &Both<CommDtype>| Strategy {
            adaptive_r: Some(adaptive_r),
            comm_dtype: *comm_dtype,
            ..Strategy::default()
        };
        let all = AdaptiveMesh::all(parallel).into_iter();
        let strategies = all.flat_map(|adaptive_r| {
            comm_dtypes
                .iter()
                .map(move |comm_dtype| strategy(adaptive_r, comm_dtype))
        });
        MeshJob {
            strategies: strategies.collect(),
            ..MeshJob::from(parallel)
        }
    }
}

/// The result of one kernel.
#[derive(Debug)]
pub struct KernelRow {
    /// The layer's name.
    pub layer: String,
    /// The kernel's name.
    pub kernel: String,
    /// The target.
    pub target: Target,
    /// The kernel's key in the store.
    pub key: KernelKey,
    /// The outcome.
    pub outcome: KernelOutcome,
}

/// The outcome of one kernel.
#[derive(Debug)]
pub enum KernelOutcome {
    /// The kernel was in the store already.
    Hit(ArtifactReport, u64),
    /// The kernel was compiled; the report, and the bytes of the binary.
    Compiled(ArtifactReport, u64),
    /// The kernel could not be compiled.
    Failed(EngineError),
}

/// Progress of [`precompile`].
#[derive(Debug)]
pub enum PrecompileEvent<'a> {
    /// The number of kernels to process.
    Start(usize),
    /// One kernel is done.
    Done(&'a KernelRow),
}

/// Compiles every kernel of every job into `store`, on all cores. Kernels
/// that several jobs share are compiled once and listed once. A kernel that
/// fails does not stop the others.
///
/// # Errors
/// When a spec is invalid or cannot be planned or emitted; nothing has been
/// compiled then.
pub fn precompile(
    jobs: &[PrecompileJob],
    store: &Arc<Store>,
    options: &CompileOptions,
    progress: &(dyn Fn(PrecompileEvent<'_>) + Sync),
) -> Result<Vec<KernelRow>, EngineError> {
    precompile_on(cores(), jobs, store, options, progress)
}

/// Does the same as [`precompile`], with at most `threads` compiles at the same time.
///
/// # Errors
/// As [`precompile`].
pub fn precompile_on(
    threads: usize,
    jobs: &[PrecompileJob],
    store: &Arc<Store>,
    options: &CompileOptions,
    progress: &(dyn Fn(PrecompileEvent<'_>) + Sync),
) -> Result<Vec<KernelRow>, EngineError> {
    let mut seen = HashSet::new();
    let mut kernels: Vec<(&PrecompileJob, KernelSource, KernelKey, Builder)> = Vec::new();
    for job in jobs {
        check_spec(&job.spec)?;
        for source in sources(job)? {
            let compiler = Some(job.compiler.clone());
            let builder = Builder::new(compiler, Some(store.clone()), options.clone());
            let key = builder.key(&source, &builder.fingerprint(job.target));
            // Jobs share most of their kernels: those of two ranks or strategies differ in a few.
            if seen.insert(key) {
                kernels.push((job, source, key, builder));
            }
        }
    }
    progress(PrecompileEvent::Start(kernels.len()));
    Ok(parallel_on(
        threads,
        &kernels,
        |(job, source, key, builder)| {
            let row = KernelRow {
                layer: job.spec.name.clone(),
                kernel: source.name.clone(),
                target: job.target,
                key: *key,
                outcome: outcome(builder, source, key, &job.spec.name),
            };
            progress(PrecompileEvent::Done(&row));
            row
        },
    ))
}

/// Returns kernels from the store, or compiles them into it, on all cores.
pub fn compile_all(
    sources: &[&KernelSource],
    compiler: &Arc<dyn Compiler>,
    store: &Arc<Store>,
    options: &CompileOptions,
) -> Vec<Result<Artifact, EngineError>> {
    let builder = Builder::new(Some(compiler.clone()), Some(store.clone()), options.clone());
    parallel_on(cores(), sources, |source| {
        let key = builder.key(source, &builder.fingerprint(source.target));
        builder
            .build(source, &key, None)
            .map(|built| built.artifact)
    })
}

/// Returns the kernels of a job; some more than once.
fn sources(job: &PrecompileJob) -> Result<Vec<KernelSource>, EngineError> {
    match &job.mesh {
        None => Ok(emit_layer(&plan(&job.spec, job.target, &job.options)?)?),
        Some(mesh) => sources_of_ranks(job, mesh),
    }
}

fn sources_of_ranks(
    job: &PrecompileJob,
    ranks: &MeshJob,
) -> Result<Vec<KernelSource>, EngineError> {
    let (spec, mesh) = (&job.spec, ranks.parallel);
    mesh.check(spec).map_err(PlanError::from)?;
    let strategies = [&[Strategy::default()], &*ranks.strategies].concat();
    // Overlap needs no kernels of its own, and an all-to-all algorithm where ranks return sums.
    let kernels: BTreeSet<_> = (strategies.iter())
        .map(|strategy| {
            strategy.check(&mesh).map_err(PlanError::from)?;
            Ok::<_, PlanError>((strategy.plan_form(&mesh), strategy.comm_dtype))
        })
        .collect::<Result<_, _>>()?;
    let mut all = Vec::new();
    for (placement, ep) in kinds(spec, ranks)? {
        let (dp, tp) = (0, 0);
        let rank = mesh.rank(RankCoords { dp, ep, tp });
        for &(form, comm_dtype) in &kernels {
            let sharing = Sharing::from(mesh).by(form).placed(Some(&placement));
            let plan =
                plan_rank(spec, job.target, &job.options, sharing, rank)?.in_comm_dtype(comm_dtype);
            for part in plan.parts() {
                all.extend(emit_layer(part)?);
            }
        }
    }
    // Ranks with GPUs sum with a kernel of their own.
    all.extend(Kernels::source(job.target));
    Ok(all)
}

/// Returns, for each number of experts that a rank may have, a placement and one of its groups with
/// that number. Ranks differ in nothing else, because shards are equal.
fn kinds(spec: &LayerSpec, ranks: &MeshJob) -> Result<Vec<(Placement, usize)>, EngineError> {
    let (mesh, experts) = (ranks.parallel, spec.shape.experts);
    let in_order = [Placement::contiguous(mesh.ep, experts)];
    let placements = match &*ranks.placements {
        [] => &in_order,
        placements => placements,
    };
    let mut kinds = BTreeMap::new();
    for placement in placements {
        placement.check(&mesh, experts).map_err(PlanError::from)?;
        for ep in 0..mesh.ep {
            let kind = || (placement.clone(), ep);
            kinds.entry(placement.count(ep)).or_insert_with(kind);
        }
    }
    Ok(kinds.into_values().collect())
}

fn outcome(
    builder: &Builder,
    source: &KernelSource,
    key: &KernelKey,
    layer: &str,
) -> KernelOutcome {
    match builder.build(source, key, Some(layer)) {
        Ok(Built { artifact, compiled }) => {
            let bytes = artifact.binary.len() as u64;
            if compiled {
                KernelOutcome::Compiled(artifact.report, bytes)
            } else {
                KernelOutcome::Hit(artifact.report, bytes)
            }
        }
        Err(error) => KernelOutcome::Failed(error),
    }
}
