//! A Mixture-of-Experts kernel compiler.
//!
//! From a declarative layer spec moesaic generates specialised gating, location, dispatch,
//! expert-GEMM and combine kernels for CPU, CUDA and ROCm. It compiles them at run time or ahead of
//! time, caches them, and runs the layer.
//!
//! ```no_run
//! use moesaic::{Engine, Input, LayerSpec, Tensors};
//!
//! # fn main() -> Result<(), moesaic::Error> {
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
//! | learn names, types and shapes of a layer's tensors | [`layer_tensors`], [`Layer::tensors`] |
//! | have rustc check shapes | [`layer!`], [`typed`] |
//! | load a model's layer | [`Engine::layer_from_hf`], [`weights`] |
//! | pass memory of a device instead of slices | [`RawCall`], [`Device`], [`Buffer`], [`Ptr`] |
//! | serve it from several threads, decode without allocation | [`Layer::handle`], [`Layer::forward_into`] |
//! | handle errors | [`Error`], [`Result`], [`errors`] |
//! | train | [`Init`], [`Training`], [`RngKey`], [`train`] |
//! | spread experts over ranks | [`Parallel`], [`Mesh`], [`Layer`], [`mesh`], [`collectives`] |
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

#![warn(missing_debug_implementations)]

pub mod aot;
mod compilers;
mod error;
pub mod errors;
pub mod experts;
mod init;
mod layers;
pub mod mesh;
#[cfg(not(all(feature = "cuda", feature = "rocm", feature = "sim")))]
mod missing;
mod model;
mod open;
mod parts;
mod reexports;
#[cfg(feature = "sim")]
mod simulators;
pub mod trace;

#[cfg(not(feature = "sim"))]
pub(crate) use missing::simulators;

pub use compilers::{Compilers, TargetNameError, resolve_target};
pub use error::{Error, Result};
pub use init::{Distribution, Init};
pub use layers::Engine;
#[cfg(feature = "macros")]
/// Generates typed layers from their specs, in files or written in place.
///
/// ```
/// moesaic::layer! {
///     /// A small layer, its spec written as TOML.
///     pub struct Tiny {
///         [shape]
///         model_dim = 64
///         hidden_dim = 128
///         experts = 8
///         top_k = 2
///
///         [router]
///         renormalize = "sum"
///     }
///
///     /// A layer whose spec is a file, relative to the folder of Cargo.toml.
///     pub struct Mixtral = "examples/specs/mixtral-8x7b.toml";
/// }
///
/// assert_eq!(Tiny::MODEL_DIM, 64);
/// assert_eq!(Mixtral::spec().shape.experts, 8);
/// ```
#[doc(inline)]
pub use moesaic_macros::layer;
pub use open::{EngineOptions, OpenError};
pub use parts::*;
pub use reexports::*;

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

/// The examples for servers, included for the same reason.
#[cfg(doctest)]
#[doc = include_str!("../docs/SERVING.md")]
pub struct Serving;
