//! One suite for every target: the same layers, the same tolerances, expected
//! values from the f64 reference.
//!
//! Each stage is held against the reference *on the stage's own inputs* as
//! the device computed them, so a difference names the kernel that made it,
//! and routing, counts and locations can be compared exactly.

mod batch;
mod caches;
mod case;
mod compare;
mod drawn;
mod emulated;
mod layers;
mod nodes;
mod orders;
mod precision;
mod routing;
mod saved;
mod simulated;
mod simulated_training;
mod tiles;
mod trained;
mod training;
mod tuned;
mod user;
mod zeros;

pub use case::Case;
pub use simulated::SIMULATORS;
