//! How ranks share a layer, as data: the mesh and the placement of experts on it, the strategy by
//! which ranks carry out a call, the collective operations of a pass, and the messages of each.
//!
//! [`OPS`] is the one table of collective operations. Plans name its operations, the executor runs
//! them, `inspect` prints their text, and the planner predicts their time. [`ALL_TO_ALLS`] is the
//! table of all-to-all algorithms, [`COMM_DTYPES`] that of dtypes between nodes, and [`schedules`]
//! says which messages an operation sends. Nothing here touches a file, a thread or a device.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without notice.

#![warn(missing_debug_implementations)]

mod all_to_all;
mod both;
mod comm_dtype;
mod mesh;
mod ops;
mod overlap;
mod part;
mod payload;
mod placement;
pub mod schedules;
mod sent;
mod shape;
mod strategy;
mod strategy_check;
mod strategy_error;
#[doc(hidden)]
pub mod testing;

pub use all_to_all::{ALL_TO_ALLS, AllToAll, AllToAllRow, Hop, RowPath};
pub use both::Both;
pub use comm_dtype::{COMM_DTYPES, CommDtype, CommDtypeRow, CommScales};
pub use mesh::{AdaptiveMesh, MeshError, Parallel, RankCoords, SharedExperts, TokenScope};
pub use ops::{Amount, Collective, CollectiveOp, NUMBER_BYTES, OPS, OpGroup, OpRow, OpText};
pub use overlap::{Chunk, Distance, Overlap, OverlapBy};
pub use part::PlanPart;
pub use payload::Payload;
pub use placement::{Balancer, Balancing, ExpertSlot, Kept, Move, Moves, moves, moves_from};
pub use placement::{Eplb, Replication, balanced, rebalance};
pub use placement::{Placement, PlacementError, RowSource, Split};
pub use placement::{ShadowForm, ShadowModel, shadows};
pub use sent::{Sends, Sent};
pub use shape::{Levels, MOST_LEVELS, NodeRank, NodeShape};
pub use strategy::{MAX_CHUNKS, ParseStrategyError, PlanForm, Strategy};
pub use strategy_error::StrategyError;
