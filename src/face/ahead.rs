//! Targets, and kernels that are compiled ahead of time.

/// A backend and its architecture.
///
/// ```
/// use moesaic::Target;
///
/// let target: Target = "cuda:sm_90a".parse()?;
/// assert_eq!((target.backend(), target.arch().as_str()), ("cuda", "sm_90a"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use moesaic_kernel::Target;

/// The caches of a CPU's core, which sizes of blocks follow.
///
/// ```
/// use moesaic::{CpuCaches, EngineOptions};
///
/// let caches = CpuCaches { l1_bytes: Some(32 << 10), l2_bytes: Some(1 << 20) };
/// let options = EngineOptions { caches: Some(caches), ..EngineOptions::default() };
/// assert_eq!(options.caches, Some(caches));
/// ```
#[doc(inline)]
pub use moesaic_kernel::CpuCaches;

/// What a plan follows beside its spec: training or inference, sizes, caches.
///
/// ```
/// use moesaic::{PlanOptions, Training};
///
/// let options = PlanOptions { training: Some(Training::default()), ..PlanOptions::default() };
/// assert!(options.training.is_some());
/// ```
#[doc(inline)]
pub use moesaic_plan::PlanOptions;

/// What is asked of the compiler.
///
/// ```
/// use moesaic::{CompileOptions, EngineOptions};
///
/// let compile = CompileOptions { allow_spills: true, ..CompileOptions::default() };
/// let options = EngineOptions { compile, ..EngineOptions::default() };
/// assert!(options.compile.allow_spills);
/// ```
#[doc(inline)]
pub use moesaic_target::CompileOptions;

/// Where compiled kernels are kept: a folder.
///
/// ```
/// use moesaic::{EngineOptions, Store};
/// use std::sync::Arc;
///
/// let store = Arc::new(Store::open(std::env::temp_dir().join("kernels")));
/// let options = EngineOptions { store: Some(store), strict: true, ..EngineOptions::default() };
/// assert!(options.strict); // a kernel that is not there is an error
/// ```
#[doc(inline)]
pub use moesaic_cache::Store;

/// Compiles layers into a store, for targets that need not be here.
///
/// ```
/// use moesaic::{CompileOptions, Compilers, Job, PlanOptions, Store, precompile, resolve_target};
/// use std::sync::Arc;
///
/// # use moesaic::example::spec;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let target = resolve_target("cpu:portable")?;
/// let job = Job {
///     spec: spec(),
///     target,
///     options: PlanOptions::default(),
///     mesh: None,
///     compiler: Compilers::default().get(target)?,
/// };
/// let store = Arc::new(Store::open(folder));
/// let rows = precompile(&[job], &store, &CompileOptions::default(), &|_| {})?;
/// assert!(rows.len() > 3); // a row for each kernel
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::precompile;

/// A layer and a target, for [`precompile`].
///
/// ```
/// use moesaic::{Compilers, Job, LayerSpec, PlanOptions, Target};
///
/// /// A job for each target whose compiler is here.
/// fn jobs(spec: &LayerSpec, targets: &[Target], compilers: &Compilers) -> Vec<Job> {
///     let job = |&target: &Target| {
///         Some(Job {
///             spec: spec.clone(),
///             target,
///             options: PlanOptions::default(),
///             mesh: None, // one process
///             compiler: compilers.get(target).ok()?,
///         })
///     };
///     targets.iter().filter_map(job).collect()
/// }
/// # let all = jobs(&moesaic::example::spec(), &[], &Compilers::default());
/// # assert!(all.is_empty());
/// ```
#[doc(inline)]
pub use moesaic_engine::Job;

/// Ranks that share the layer of a [`Job`], and what they may do.
///
/// ```
/// use moesaic::{MeshJob, Parallel};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let parallel = Parallel { ep: 2, ..Parallel::default() };
/// let job = MeshJob {
///     strategies: vec!["wire=fp8/bf16".parse()?],
///     ..MeshJob::from(parallel)
/// };
/// # assert_eq!(job.strategies.len(), 1);
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::MeshJob;

/// How a kernel went in [`precompile`].
///
/// ```
/// use moesaic::{Outcome, Row};
///
/// fn failures(rows: &[Row]) -> Vec<String> {
///     let failed = |row: &Row| match &row.outcome {
///         Outcome::Failed(error) => Some(format!("{} on {}: {error}", row.kernel, row.target)),
///         Outcome::Hit(..) | Outcome::Compiled(..) => None,
///     };
///     rows.iter().filter_map(failed).collect()
/// }
/// # assert!(failures(&[]).is_empty());
/// ```
#[doc(inline)]
pub use moesaic_engine::Outcome;

/// A kernel that [`precompile`] looked at.
///
/// ```
/// use moesaic::{Outcome, Row};
///
/// fn compiled(rows: &[Row]) -> usize {
///     let new = rows.iter().filter(|row| matches!(row.outcome, Outcome::Compiled(..)));
///     new.count()
/// }
/// # assert_eq!(compiled(&[]), 0);
/// ```
#[doc(inline)]
pub use moesaic_engine::Row;

/// Progress of [`precompile`].
///
/// ```
/// use moesaic::Event;
///
/// let show = |event: Event<'_>| match event {
///     Event::Start(kernels) => println!("{kernels} kernels"),
///     Event::Done(row) => println!("{} for {}", row.kernel, row.target),
/// };
/// show(Event::Start(5));
/// ```
#[doc(inline)]
pub use moesaic_engine::Event;
