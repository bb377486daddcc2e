//! Targets, and the options of compiling kernels for them.

/// A backend and its architecture, such as `cuda:sm_90a`.
///
/// Parse one from its full name, or ask [`resolve_target`](crate::resolve_target), which also knows
/// the bare `cpu`. [`Target::backend`] and [`Target::arch`] take it apart; targets are equal if
/// their names are.
///
/// ```
/// use moesaic::Target;
///
/// let target: Target = "cuda:sm_90a".parse()?;
/// assert_eq!((target.backend(), target.arch().as_str()), ("cuda", "sm_90a"));
/// assert!(Target::all().contains(&target)); // every name that parses
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use moesaic_kernel::Target;

/// The cache sizes of one CPU core, from which kernels take their block sizes.
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

/// The inputs of a plan beside its spec: training or inference, and the caches of a CPU.
///
/// ```
/// use moesaic::{PlanOptions, Training};
///
/// let options = PlanOptions { training: Some(Training::default()), ..PlanOptions::default() };
/// assert!(options.training.is_some());
/// ```
#[doc(inline)]
pub use moesaic_plan::PlanOptions;

/// Options for the compiler.
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

/// A compiler of one backend, which [`Compilers`](crate::Compilers) finds on this machine: NVRTC,
/// clang, or the C compiler.
///
/// You pass it on to [`PrecompileJob`](crate::aot::PrecompileJob), and print its name; moesaic
/// calls it.
///
/// ```
/// use moesaic::{Compiler, Compilers, Target};
/// use std::sync::Arc;
///
/// /// The compilers of a build job, one for each target.
/// struct Toolchain(Vec<(Target, Arc<dyn Compiler>)>);
///
/// impl Toolchain {
///     fn find(targets: &[Target]) -> Result<Toolchain, moesaic::Error> {
///         let compilers = Compilers::default();
///         let found = targets.iter().map(|&target| Ok((target, compilers.get(target)?)));
///         found.collect::<Result<_, _>>().map(Toolchain)
///     }
/// }
/// # let found = Toolchain::find(&[moesaic::resolve_target("cpu")?])?;
/// # assert_eq!(found.0[0].1.backend(), "cpu");
/// # Ok::<(), moesaic::Error>(())
/// ```
#[doc(inline)]
pub use moesaic_target::Compiler;

/// A folder of compiled kernels.
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
