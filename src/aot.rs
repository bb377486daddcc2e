//! Ahead-of-time compilation of kernels, on machines that need not have the device, and the upkeep
//! of the store that holds them.
//!
//! Start at [`precompile`]. An engine with [`EngineOptions::strict`](crate::EngineOptions::strict)
//! then runs from the store alone.

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

/// The cache sizes of a CPU, rounded down to one of eight classes that kernels distinguish.
///
/// An engine takes the class of its own machine. Name another one to compile for CPUs that are not
/// this machine's:
///
/// ```
/// use moesaic::aot::CacheClass;
/// use moesaic::{CpuCaches, PlanOptions};
///
/// // Of the machines that will run the layer, by `lscpu`.
/// let caches = CpuCaches { l1_bytes: Some(32 << 10), l2_bytes: Some(1 << 20) };
/// let options = PlanOptions { caches: CacheClass::of(caches), ..PlanOptions::default() };
/// assert_eq!(options.caches.l2_bytes(), 1 << 20);
/// ```
#[doc(inline)]
pub use moesaic_plan::CacheClass;

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

/// A kernel that a [`Store`](crate::Store) holds, as [`Store::list`](crate::Store::list) returns it.
///
/// ```
/// use moesaic::{Store, Target};
///
/// /// The bytes of the kernels for a target.
/// fn bytes(store: &Store, target: Target) -> u64 {
///     let list = store.list().into_iter();
///     list.filter(|kernel| kernel.info.target == target).map(|kernel| kernel.bytes).sum()
/// }
/// # let folder = std::env::temp_dir().join("moesaic-no-kernels");
/// # assert_eq!(bytes(&Store::open(folder), "cuda:sm_90a".parse().unwrap()), 0);
/// ```
#[doc(inline)]
pub use moesaic_cache::Listed;
#[doc(inline)]
pub use moesaic_cache::{KernelInfo, KernelKey, NotAKey};

/// The way in which [`Store::verify`](crate::Store::verify) treats damaged kernels.
///
/// ```
/// use moesaic::Store;
/// use moesaic::aot::OnBad;
///
/// let store = Store::open(std::env::temp_dir().join("moesaic-no-kernels"));
/// for bad in store.verify(OnBad::Report).bad {
///     println!("{}: {}", bad.path.display(), bad.reason);
/// }
/// ```
#[doc(inline)]
pub use moesaic_cache::OnBad;
#[doc(inline)]
pub use moesaic_cache::{Bad, Verified};

/// The rule by which [`Store::prune`](crate::Store::prune) removes kernels.
///
/// ```
/// use moesaic::aot::PruneRule;
/// use std::time::Duration;
///
/// let unused_for_a_month = PruneRule {
///     max_age: Some(Duration::from_secs(30 * 24 * 60 * 60)),
///     ..PruneRule::default()
/// };
/// assert_eq!(unused_for_a_month.max_bytes, None);
/// ```
#[doc(inline)]
pub use moesaic_cache::PruneRule;
#[doc(inline)]
pub use moesaic_cache::Pruned;

#[doc(inline)]
pub use moesaic_cache::StoreError;
/// The hits and misses of a [`Store`](crate::Store) since it was opened.
/// [`Store::trouble`](crate::Store::trouble) has the reason if it keeps nothing.
///
/// ```
/// use moesaic::Store;
///
/// let store = Store::open(std::env::temp_dir().join("moesaic-no-kernels"));
/// assert_eq!(store.stats().hits, 0);
/// assert!(store.trouble().is_none());
/// ```
#[doc(inline)]
pub use moesaic_cache::StoreStats;

/// The sources of the kernels that an engine has loaded: compiled now, read from the store, or in
/// memory already.
///
/// ```
/// use moesaic::Engine;
/// use moesaic::aot::EngineStats;
///
/// /// Returns an error if a deployed engine had to compile.
/// fn check(engine: &Engine) -> Result<(), String> {
///     let EngineStats { compiled, from_store, .. } = engine.stats();
///     match compiled {
///         0 => Ok(()),
///         _ => Err(format!("{compiled} kernels were not in the pack, {from_store} were")),
///     }
/// }
/// # assert_eq!(check(&moesaic::example::engine()), Ok(()));
/// ```
#[doc(inline)]
pub use moesaic_engine::EngineStats;

/// The reason that a pack cannot be written or read.
///
/// ```
/// use moesaic::Store;
/// use moesaic::aot::PackError;
/// use std::path::Path;
///
/// /// Copies the kernels of one store to another through a file.
/// fn carry(from: &Store, pack: &Path, to: &Store) -> Result<usize, PackError> {
///     from.export(pack, |_| true)?;
///     Ok(to.import(pack)?.added)
/// }
/// # let folder = tempfile::tempdir().unwrap();
/// # let store = |name| Store::open(folder.path().join(name));
/// # assert_eq!(carry(&store("a"), &folder.path().join("p"), &store("b")).unwrap(), 0);
/// ```
#[cfg(feature = "packs")]
#[doc(inline)]
pub use moesaic_cache::PackError;
#[cfg(feature = "packs")]
#[doc(inline)]
pub use moesaic_cache::{Exported, Imported};

/// The facts about a compiled kernel: its compiler, and each entry's registers, spills and shared
/// memory.
///
/// ```
/// use moesaic::aot::{KernelOutcome, KernelRow};
///
/// /// The most registers that a thread of the kernel takes.
/// fn registers(row: &KernelRow) -> Option<u32> {
///     match &row.outcome {
///         KernelOutcome::Hit(report, _) | KernelOutcome::Compiled(report, _) => {
///             report.kernels.iter().filter_map(|kernel| kernel.registers).max()
///         }
///         KernelOutcome::Failed(_) => None,
///     }
/// }
/// # let _ = registers;
/// ```
#[doc(inline)]
pub use moesaic_target::ArtifactReport;
#[doc(inline)]
pub use moesaic_target::KernelReport;
