//! The names at the root of this crate that other crates define, with an
//! example of each.

mod ahead;
mod experts;
mod ranks;
mod running;
mod tracing;
mod training;

pub use ahead::*;
pub use experts::*;
pub use ranks::*;
pub use running::*;
pub use tracing::*;
pub use training::*;
