//! Targets, and the options of compiling kernels for them.

/// A backend and its architecture, such as `cuda:sm_90a`.
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

/// The inputs of a plan beside its spec: training or inference, size limits, caches.
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
