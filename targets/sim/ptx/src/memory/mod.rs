//! Device memory: allocations with gaps between them, and which of their
//! bytes have been written.

mod allocation;
mod bits;
mod heap;
mod log;

pub use allocation::Allocation;
pub use heap::{Heap, Regions};
pub use log::{BlockLog, Conflict, LaunchLog, Touch};
