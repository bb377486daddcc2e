//! Ahead-of-time compilation of kernels, on machines that need not have the device.

/// Compiles layers into a store. The devices of the targets need not be on this machine.
///
/// ```
/// use moesaic::{CompileOptions, Compilers, PlanOptions, Store, resolve_target};
/// use moesaic::aot::{Job, precompile};
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

/// A layer and a target for [`precompile`].
///
/// ```
/// use moesaic::{Compilers, LayerSpec, PlanOptions, Target};
/// use moesaic::aot::Job;
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

/// The ranks that share the layer of a [`Job`], and the strategies that they may choose.
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
/// use moesaic::aot::{Outcome, Row};
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

/// A kernel that [`precompile`] visited, with its outcome.
///
/// ```
/// use moesaic::aot::{Outcome, Row};
///
/// fn compiled(rows: &[Row]) -> usize {
///     let new = rows.iter().filter(|row| matches!(row.outcome, Outcome::Compiled(..)));
///     new.count()
/// }
/// # assert_eq!(compiled(&[]), 0);
/// ```
#[doc(inline)]
pub use moesaic_engine::Row;

/// A progress report of [`precompile`].
///
/// ```
/// use moesaic::aot::Event;
///
/// let show = |event: Event<'_>| match event {
///     Event::Start(kernels) => println!("{kernels} kernels"),
///     Event::Done(row) => println!("{} for {}", row.kernel, row.target),
/// };
/// show(Event::Start(5));
/// ```
#[doc(inline)]
pub use moesaic_engine::Event;
