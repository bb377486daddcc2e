//! The choice of a [`Strategy`](moesaic_plan::Strategy) for a layer over ranks.
//!
//! A strategy changes no result and moves no weight. So a layer can try several in its own
//! training steps and evaluations, and keep the fastest. The best one depends on the number of
//! rows, so there is a choice for each [`TunerKey`]. The tuner finds it by Tutel's search or, where
//! there are predictions, by measuring the few strategies that are predicted to be fast:
//!
//! ```text
//! key unknown ──> candidates ──> each in some real steps ──> the fastest, kept
//! ^                                            │
//! └────────── times have drifted ──────────────┘
//! ```
//!
//! [`Tuner`] decides. It takes and returns plain data, without clock or ranks, so ranks that pass
//! the same numbers decide alike. [`LayerTuner`] measures, and gives every rank the largest
//! time of all ranks. [`Planned`] predicts with the planner.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without notice.

#![warn(missing_debug_implementations)]

mod key;
mod layer;
mod measured;
mod planned;
mod search;
mod stored;
mod tuner;

pub use key::{CallKind, RowBucket, TunerKey};
pub use layer::{LayerTuner, Loads, Predict};
pub use measured::Times;
pub use planned::Planned;
pub use search::{PredictedTime, StrategySpace, shortlist};
pub use stored::{ChoicesError, StoredChoice, read, write};
pub use tuner::{CLOSE, Tuner, TunerDecision, TunerMode, TunerOptions, What};
