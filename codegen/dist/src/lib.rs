//! How ranks share a layer, as data: which collective operations they run, between which parts of
//! a plan, over which process group, and how many bytes each of them sends.
//!
//! [`OPS`] is the one table of collective operations. Plans name its operations, the executor runs
//! them, `inspect` prints their text, and the planner predicts their time. Nothing here touches a
//! file, a thread or a device.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without notice.

mod ops;
mod part;
mod payload;
mod sent;

pub use ops::{Amount, Collective, CollectiveOp, NUMBER_BYTES, OPS, OpGroup, OpRow, OpText};
pub use part::PlanPart;
pub use payload::Payload;
pub use sent::{Nodes, Sends, Sent};
