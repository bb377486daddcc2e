//! Device memory: allocations with gaps between them, and records of the bytes
//! that were written.

mod allocation;
mod bits;
mod heap;
mod log;

pub use allocation::Allocation;
pub use heap::{Heap, Regions};
pub use log::{BlockLog, Conflict, LaunchLog, Touch};
