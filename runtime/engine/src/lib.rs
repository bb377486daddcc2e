//! Compiles, caches, loads and runs layers.
//!
//! ```text
//! Engine::layer(spec, weights)
//!   plan ─> emit ─> key ─> in memory? ─> in the store? ─> compile ─> load
//!   weights ─> a piece at a time: checked, and put on the device
//! Layer::forward(input)
//!   for step in plan.steps: bind tensors to addresses, launch
//! ```
//!
//! The engine names no concrete target: it is handed a [`Device`], a
//! [`Compiler`] or none, and a store or none.
//!
//! [`Device`]: moesaic_target::Device
//! [`Compiler`]: moesaic_target::Compiler
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

mod addresses;
mod engine;
mod error;
mod forward;
mod jit;
mod launch;
mod layer;
mod multi_gate;
mod parallel;
mod pass;
mod place;
mod precompile;
mod shared;
mod stack;
mod statistics;
mod texts;
mod training;
mod tuned;
mod user;
mod variants;
mod workspace;

pub use engine::{Engine, EngineParts, LoadedKernel, Stats};
pub use error::EngineError;
pub use forward::{Input, Output, RawCall, StepTime};
pub use launch::Counters;
pub use layer::Layer;
pub use multi_gate::{MultiGate, MultiSaved};
pub use precompile::{Event, Job, Outcome, Row, precompile, precompile_on};
pub use statistics::{Record, Statistics};
pub use training::{RawBackward, Saved};
pub use tuned::{Measured, TunedPlans, Untuned};
pub use user::{ExpertBackward, UserExpert, UserLayer, UserSaved};
pub use variants::Variants;
