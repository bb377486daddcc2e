//! A Mixture-of-Experts kernel compiler.
//!
//! From a declarative layer spec moesaic generates specialised gating, location, dispatch,
//! expert-GEMM and combine kernels for CPU, CUDA and ROCm. It compiles them at run time or ahead of
//! time, caches them, and runs the layer.
//!
//! ```no_run
//! use moesaic::{Engine, Input, LayerSpec, Tensors};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let spec = LayerSpec::from_toml(
//!     "shape = { model_dim = 64, hidden_dim = 128, experts = 8, top_k = 2 }",
//! )?;
//! let (router, gate) = (vec![0.1f32; 8 * 64], vec![0.2f32; 8 * 128 * 64]);
//! let (up, down) = (gate.clone(), vec![0.3f32; 8 * 64 * 128]);
//! let weights = Tensors::new()
//!     .with("router.weight", &[8, 64], &router)
//!     .with("experts.gate.weight", &[8, 128, 64], &gate)
//!     .with("experts.up.weight", &[8, 128, 64], &up)
//!     .with("experts.down.weight", &[8, 64, 128], &down);
//! let layer = Engine::cpu()?.layer(&spec, &weights)?;
//! let x = vec![1.0f32; 5 * 64];
//! let y = layer.forward(&Input::new(5, &x))?.y().to_f32();
//! assert_eq!(y.len(), 5 * 64);
//! # Ok(())
//! # }
//! ```
//!
//! | to | start at |
//! |---|---|
//! | make a layer and call it | [`Engine`], [`LayerSpec`], [`Tensors`], [`Layer`], [`Input`] |
//! | have rustc check shapes | [`layer!`], [`typed`] |
//! | load a checkpoint | [`weights`] |
//! | train | [`Training`], [`RngKey`], [`train`] |
//! | spread experts over ranks | [`Parallel`], [`Mesh`], [`MeshLayer`], [`mesh`], [`collectives`] |
//! | choose how ranks exchange rows | [`Strategy`], [`tune`] |
//! | bring your own experts, or several routers | [`experts`] |
//! | see where time goes | [`trace`] |
//! | compile ahead of time | [`aot`], [`Store`], [`Compilers`] |
//!
//! # Features
//! All are off by default. A feature adds items and changes no result.
//!
//! * `macros`: [`layer!`].
//! * `train`: [`train`], with optimizers, steps over many ranks, gates that look at ranks, and
//!   checkpoints whose number of experts changes.
//! * `tune`: [`tune`], which chooses the strategy of ranks from call to call.
//! * `packs`: a store's kernels as one file ([`Store`]'s `export` and `import`).
//! * `cuda`, `rocm`: the GPUs of this machine. Compiling for them needs no feature.
//! * `sim`: the targets `sim:*`, which run kernels of GPUs and of other CPUs on this machine.
//! * `reference`: the whole layer in f64, as plain loops, to compare results with.
//!
//! # Other crates
//! Depend on this crate alone. The crates named `moesaic-*` are its parts and change without
//! notice.

pub mod aot;
mod compilers;
pub mod experts;
pub mod mesh;
#[cfg(not(all(feature = "cuda", feature = "rocm", feature = "sim")))]
mod missing;
mod open;
mod reexports;
#[cfg(feature = "sim")]
mod simulators;
pub mod trace;

#[cfg(not(feature = "sim"))]
use missing::simulators;

pub use compilers::{Compilers, TargetNameError, resolve_target};
#[cfg(feature = "macros")]
#[doc(inline)]
pub use moesaic_macros::layer;
pub use open::{Engine, EngineOptions, OpenError};
pub use reexports::*;

#[doc(inline)]
pub use moesaic_collectives as collectives;
#[doc(inline)]
#[cfg(feature = "reference")]
pub use moesaic_reference as reference;
/// The spec of a layer: its keys, defaults, and readers of model configs.
///
/// ```
/// use moesaic::spec::{LayerSpec, canonical_tensors};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let text = "shape = { model_dim = 64, hidden_dim = 128, experts = 8, top_k = 2 }";
/// let spec = LayerSpec::from_toml(text)?;
/// let weights = canonical_tensors(&spec);
/// assert_eq!(weights[0].name, "router.weight");
/// # Ok(())
/// # }
/// ```
///
#[doc(inline)]
pub use moesaic_spec as spec;
#[cfg(feature = "train")]
#[doc(inline)]
pub use moesaic_train as train;
#[cfg(feature = "tune")]
/// Choosing the strategy of ranks, from measurements of your own training or serving steps.
///
/// ```
/// use moesaic::Parallel;
/// use moesaic::tune::{Calls, Key, Options, Rows, Space, Times, Tuner};
///
/// let mesh = Parallel { ep: 16, ..Parallel::default() };
/// let mut tuner = Tuner::new(Options::default(), Space::of(mesh, 8));
/// let key = Key {
///     machine: "our rack".to_string(),
///     layer: "mixtral".to_string(),
///     calls: Calls::Training,
///     rows: Rows::of(1000, None),
/// };
/// // A layer does this in each step: nothing is predicted here, so Tutel's search says what next.
/// let strategy = tuner.choose(&key, Vec::new);
/// tuner.observe(&key, strategy, Times { forward: 0.002, backward: 0.004 });
/// assert_eq!(tuner.events().len(), 1);
/// ```
///
#[doc(inline)]
pub use moesaic_tune as tune;
/// The building blocks of `layer!`: arrays as tensors, and typed device memory.
///
/// ```
/// use moesaic::typed::tensor;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let flat = vec![0.5f32; 8 * 64];
/// let weight: &[[f32; 64]; 8] = tensor(&flat)?;
/// assert_eq!(weight[7][63], 0.5);
/// # Ok(())
/// # }
/// ```
///
#[doc(inline)]
pub use moesaic_typed as typed;
/// Checkpoints in safetensors, of this and other libraries, read one expert at a time, and written.
///
/// ```
/// use moesaic::weights::{Checkpoint, write_safetensors};
/// use moesaic::Tensors;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("layer.safetensors");
/// let router = vec![0.5f32; 8 * 64];
/// write_safetensors(&path, &Tensors::new().with("router.weight", &[8, 64], &router))?;
/// let found = Checkpoint::open(&path)?.read("router.weight")?; // mapped, not copied
/// assert_eq!(found.shape, [8, 64]);
/// # Ok(())
/// # }
/// ```
///
#[doc(inline)]
pub use moesaic_weights as weights;

// The command line and the tests are made of these parts, which change without notice.
#[doc(hidden)]
pub use moesaic_cache as cache;
#[doc(hidden)]
pub use moesaic_cpu as cpu;
#[doc(hidden)]
pub use moesaic_cuda as cuda;
#[doc(hidden)]
pub use moesaic_emit as emit;
#[doc(hidden)]
pub use moesaic_engine as engine;
#[doc(hidden)]
pub use moesaic_kernel as kernel;
#[doc(hidden)]
pub use moesaic_plan as plan;
#[cfg(feature = "tune")]
#[doc(hidden)]
pub use moesaic_planner as planner;
#[doc(hidden)]
pub use moesaic_rocm as rocm;
#[doc(hidden)]
pub use moesaic_target as target;
#[doc(hidden)]
pub use moesaic_tensor as tensor;
#[doc(hidden)]
pub use moesaic_toolchain as toolchain;

#[doc(hidden)]
pub mod example;

/// The README's examples, included here so that doctests compile them.
#[cfg(all(doctest, feature = "macros"))]
#[doc = include_str!("../README.md")]
pub struct Readme;

/// The guide's examples, included for the same reason.
#[cfg(all(doctest, feature = "macros", feature = "train"))]
#[doc = include_str!("../docs/GUIDE.md")]
pub struct Guide;
