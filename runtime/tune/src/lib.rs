//! Which [`Strategy`](moesaic_plan::Strategy) ranks carry out a layer with.
//!
//! A strategy changes no result and moves no weight, so a layer can try some in its own
//! training steps and evaluations, and keep what was fastest. What is right depends on how
//! many rows there are, so there is a choice for each [`Key`]. The way to it is Tutel's
//! search, or, where there are predictions, a few measurements of what is predicted to be
//! fast:
//!
//! ```text
//! key unknown ──> candidates ──> each in some real steps ──> the fastest, kept
//!                    ^                                            │
//!                    └────────── times have drifted ──────────────┘
//! ```
//!
//! [`Tuner`] decides: plain data in, plain data out, no clock and no ranks, so that all
//! ranks that are told the same numbers decide alike. [`AdaptiveLayer`] measures, and
//! tells all ranks the largest time of any. [`Planned`] predicts, by the planner.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

mod key;
mod layer;
mod measured;
mod planned;
mod raw;
mod search;
mod stored;
mod tuner;

pub use key::{Calls, Key, Rows};
pub use layer::{AdaptiveLayer, AdaptiveSaved, Loads, Predict};
pub use measured::Times;
pub use planned::Planned;
pub use search::{Prediction, Space, shortlist};
pub use stored::{Record, StoredError, read, write};
pub use tuner::{CLOSE, Event, Mode, Options, Tuner, What};
