//! A Mixture-of-Experts kernel compiler.
//!
//! From a declarative layer spec moesaic generates specialised gating,
//! location, dispatch, expert-GEMM and combine kernels for CPU, CUDA and ROCm,
//! compiles them at run time or ahead of time, caches them, and runs the
//! layer.
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
//! This crate is the facade: it joins the parts and names the targets.
//! docs/ARCHITECTURE.md says where each part lives.

mod compilers;
mod engine;
mod simulators;

pub use compilers::{Compilers, TargetNameError, resolve_target};
pub use engine::{Engine, EngineOptions, OpenError};
pub use half;
pub use moesaic_cache::Store;
/// Flags the C compiler gets for an instruction set.
pub use moesaic_cpu::compile_flags as cpu_flags;
pub use moesaic_engine::{
    Counters, EngineError, Event, ExpertBackward, Input, Job, Layer, LoadedKernel, Measured,
    MultiGate, MultiSaved, Outcome, Output, RawBackward, RawCall, Record, Row, Saved, Statistics,
    Stats, StepTime, TunedPlans, Untuned, UserExpert, UserLayer, UserSaved, Variants, precompile,
    precompile_on,
};
pub use moesaic_kernel::{
    CpuCaches, CpuIsa, DType, KernelSource, SimArch, Size, Stem, Target, TargetError,
};
pub use moesaic_macros::layer;
pub use moesaic_plan::{LayerPlan, PlanOptions, Recompute, Tilings, Training, Work};
pub use moesaic_spec::LayerSpec;
pub use moesaic_tensor::{Bytes, Element, Tensor, Tensors, WeightSource};

/// The kernel store and its packs.
pub use moesaic_cache as cache;
/// The CPU target, for its limits.
pub use moesaic_cpu as cpu;
/// The CUDA target; its device needs the feature `cuda`.
pub use moesaic_cuda as cuda;
/// From plan to text.
pub use moesaic_emit as emit;
/// Plain data of the pipeline: sources, entries, sizes.
pub use moesaic_kernel as kernel;
/// From spec to plan.
pub use moesaic_plan as plan;
/// The f64 reference.
pub use moesaic_reference as reference;
/// The ROCm target.
pub use moesaic_rocm as rocm;
/// The layer spec: types, TOML, validation, Hugging Face import.
pub use moesaic_spec as spec;
/// The target interface: compilers, devices, artifacts.
pub use moesaic_target as target;
/// Where compilers come from.
pub use moesaic_toolchain as toolchain;
/// Optimizers, and checkpoints whose number of experts changes.
pub use moesaic_train as train;
/// What the layers of [`layer!`] are made of.
pub use moesaic_typed as typed;
/// Checkpoints.
pub use moesaic_weights as weights;

/// The README's example, so that it keeps compiling.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
