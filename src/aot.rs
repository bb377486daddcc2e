//! Ahead-of-time compilation of kernels, on machines that need not have the device.

/// Compiles layers into a store. The devices of the targets need not be on this machine.
///
/// ```
/// use moesaic::{CompileOptions, Compilers, PlanOptions, Store, resolve_target};
/// use moesaic::aot::{PrecompileJob, precompile};
/// use std::sync::Arc;
///
/// # use moesaic::example::spec;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let target = resolve_target("cpu:portable")?;
/// let job = PrecompileJob {
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

/// A layer and a target for [`precompile`].
///
/// ```
/// use moesaic::{Compilers, LayerSpec, PlanOptions, Target};
/// use moesaic::aot::PrecompileJob;
///
/// /// A job for each target whose compiler is here.
/// fn jobs(spec: &LayerSpec, targets: &[Target], compilers: &Compilers) -> Vec<PrecompileJob> {
///     let job = |&target: &Target| {
///         Some(PrecompileJob {
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
pub use moesaic_engine::PrecompileJob;

/// The ranks that share the layer of a [`PrecompileJob`], and the strategies that they may choose.
///
/// ```
/// use moesaic::Parallel;
/// use moesaic::aot::MeshJob;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let parallel = Parallel { ep: 2, ..Parallel::default() };
/// let job = MeshJob {
///     strategies: vec!["comm_dtype=fp8/bf16".parse()?],
///     placements: vec!["0-4 | 5-7,+0".parse()?], // ranks with five experts and with four
///     ..MeshJob::from(parallel)
/// };
/// # assert_eq!(job.strategies.len(), 1);
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::MeshJob;

/// The fate of a kernel in [`precompile`]: compiled, already stored, or failed.
///
/// ```
/// use moesaic::aot::{KernelOutcome, KernelRow};
///
/// fn failures(rows: &[KernelRow]) -> Vec<String> {
///     let failed = |row: &KernelRow| match &row.outcome {
///         KernelOutcome::Failed(error) => {
///             Some(format!("{} on {}: {error}", row.kernel, row.target))
///         }
///         KernelOutcome::Hit(..) | KernelOutcome::Compiled(..) => None,
///     };
///     rows.iter().filter_map(failed).collect()
/// }
/// # assert!(failures(&[]).is_empty());
/// ```
#[doc(inline)]
pub use moesaic_engine::KernelOutcome;

/// A kernel that [`precompile`] visited, with its outcome.
///
/// ```
/// use moesaic::aot::{KernelOutcome, KernelRow};
///
/// fn compiled(rows: &[KernelRow]) -> usize {
///     let new = rows.iter().filter(|row| matches!(row.outcome, KernelOutcome::Compiled(..)));
///     new.count()
/// }
/// # assert_eq!(compiled(&[]), 0);
/// ```
#[doc(inline)]
pub use moesaic_engine::KernelRow;

/// A progress report of [`precompile`].
///
/// ```
/// use moesaic::aot::PrecompileEvent;
///
/// let show = |event: PrecompileEvent<'_>| match event {
///     PrecompileEvent::Start(kernels) => println!("{kernels} kernels"),
///     PrecompileEvent::Done(row) => println!("{} for {}", row.kernel, row.target),
/// };
/// show(PrecompileEvent::Start(5));
/// ```
#[doc(inline)]
pub use moesaic_engine::PrecompileEvent;
