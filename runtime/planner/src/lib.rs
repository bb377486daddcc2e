//! What a layer over many ranks will take on a machine, before a job starts.
//!
//! ```text
//! Machine (a file) ──┐
//! RankPlan, Strategy ┼─ simulate ─> Prediction: time of each phase, bytes, memory, what bounds
//! counts of rows ────┘                  └─ search ─> ranked configurations
//! ```
//!
//! The steps that are simulated are those that ranks run ([`moesaic_plan::RankPlan`]): each
//! launch costs what its arithmetic, bytes and tiles say, each exchange what its messages
//! say. Nothing here looks at a file, a clock or a device. Every number that comes out is a
//! prediction of a model; docs/SCALE.md says how far published measurements are from it.
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
pub use calibration::{Calibration, LevelFit, Measured, Timed};
pub use cost::Cost;
pub use exchange::{LevelTime, Load, MOST_LEVELS, Phase, PhaseTime};
pub use fit::{Fit, Point, fit, fit_line};
pub use machine::{
    AllToAllFactor, Band, Compute, Factor, Fanout, Level, Machine, Overlap, published,
    published_names,
};
pub use memory::Memory;
pub use reach::expected_groups;
pub use read::ReadError;
pub use routing::{Routing, RoutingError};
pub use scenario::{Bound, PassTime, PhaseOf, PlannerError, Prediction, Scenario, Simulated};
pub use search::{Ranked, Space, search};
pub use simulate::Simulator;
pub use trace::chrome;
