//! The layer that users call, of one process or over ranks.

mod calls;
mod form;
mod options;
mod saved;
mod strategy;
mod tuned;
mod weights;

pub use form::{Layer, PassTime, StrategyTuner, TunedCall};
pub use options::LayerOptions;
pub use saved::Saved;
