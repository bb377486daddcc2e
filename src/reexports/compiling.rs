//! Targets, and how kernels are compiled.

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
