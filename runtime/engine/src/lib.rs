//! Compiles, caches, loads and runs layers.
//!
//! ```text
//! Engine::layer(spec, weights)
//!   plan ─> emit ─> key ─> in memory? ─> in the store? ─> compile ─> load
//!   weights ─> a few rows at a time: checked, and put on the device
//!   steps   ─> functions, tensors by number, scalars: bound once
//! Layer::forward(input)
//!   every tensor gets an address, every step is launched
//! ```
//!
//! The engine knows no concrete target: you hand it a [`Device`], a [`Compiler`] or none, and a
//! store or none.
//!
//! [`Device`]: moesaic_target::Device
//! [`Compiler`]: moesaic_target::Compiler
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

#![warn(missing_debug_implementations)]

mod addresses;
mod bank;
mod by_token;
mod call;
mod device_layer;
mod engine;
mod error;
mod expert_ranks;
mod forward;
mod host;
mod into;
mod jit;
mod launch;
mod layer;
mod memory;
mod mesh;
mod multi_gate;
mod numbers;
mod parallel;
mod pass;
mod place;
mod precompile;
mod reason;
mod router;
mod row_bytes;
mod shared;
mod stack;
mod statistics;
mod tensor_list;
mod texts;
mod trace;
mod training;
mod tuned;
mod turns;
mod user;
mod user_expert;
mod variants;

pub use by_token::SavedByToken;
pub use call::{CallInput, Input, Output, OutputGradient, RawBackward, RawCall, RngKey, StepTime};
pub use engine::{Engine, LoadedKernel};
pub use error::{DifferentWeight, EngineError};
pub use jit::{EngineParts, EngineStats};
pub use layer::{Layer, LayerOptions, PassTime, Saved, StrategyTuner, TunedCall};
pub use mesh::{
    Mesh, ProcessGroup, Ranks, Shard, Timestamp, joined, joined_placed, part_of, part_of_placed,
    part_shape, part_shape_placed,
};
pub use multi_gate::{MultiGate, MultiSaved};
pub use precompile::{KernelOutcome, KernelRow, MeshJob, PrecompileEvent, PrecompileJob};
pub use precompile::{compile_all, precompile, precompile_on};
pub use reason::{InputReason, OutputReason, SaveReason, SpecReason, WeightReason};
pub use statistics::{Record, Statistics};
pub use tensor_list::{LayerCall, LayerTensor, LayerTensorRole, TensorDim, layer_tensors};
pub use trace::{Activity, Lane, Recorded, Recorder, Trace, chrome_trace};
pub use tuned::{TunedPlans, TunedTimes, Untuned};
pub use user::{UserLayer, UserSaved};
pub use user_expert::{ExpertBackward, UserExpert};
pub use variants::Variants;
