//! Predictions of a layer over many ranks on a machine, before a job starts.
//!
//! ```text
//! Machine (a file) ──┐
//! RankPlan, Strategy ┼─ simulate ─> Prediction: time of each phase, bytes, memory, bottleneck
//! rows by expert ────┘                  └─ search ─> ranked configurations
//! ```
//!
//! The planner simulates the steps that ranks run ([`moesaic_plan::RankPlan`]). The cost of a
//! launch follows from its arithmetic, bytes and tiles, the cost of an exchange from its
//! messages. The planner reads no file, clock or device. Every result is the prediction of a
//! model; docs/SCALE.md compares it with published measurements.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without notice.

mod all_to_all;
mod calibration;
mod chunks;
mod collective_ops;
mod cost;
mod exchange;
mod fit;
mod geometry;
mod machine;
mod memory;
pub mod model;
mod plan_parts;
mod reach;
mod read;
mod routing;
mod run;
mod scenario;
mod schedule;
mod search;
mod shadows;
mod simulate;
mod trace;
mod traffic;
pub mod validate;

pub use all_to_all::all_to_all_factor;
pub use calibration::{Calibration, LevelFit, MeasuredProcessor, Timed};
pub use cost::Cost;
pub use exchange::{LevelLoad, LevelTime, MOST_LEVELS, Phase, PhaseTime};
pub use fit::{Fit, Point, fit, fit_line};
pub use machine::{
    AllToAllFactor, Band, Compute, Factor, Fanout, Level, Machine, ModelFactor, OverlapModel,
    published, published_names,
};
pub use memory::MemoryUse;
pub use reach::expected_groups;
pub use read::ReadError;
pub use routing::{RoutedRows, RoutingError};
pub use scenario::{
    Bottleneck, PassEstimate, PhaseOf, PlannerError, Prediction, Scenario, Simulated,
};
pub use search::{Ranked, Space, search};
pub use simulate::Simulator;
pub use trace::chrome;
