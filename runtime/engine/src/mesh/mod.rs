//! Layers whose experts live on many ranks.
//!
//! [`Mesh`] holds a rank's coordinates and its process groups. [`RankLayer`] is one rank's part of
//! a layer: it runs the steps of a [`RankPlan`](moesaic_plan::RankPlan), launches and exchanges in
//! one list.

mod all_to_all;
mod applied_routing;
mod bound_plan;
mod call_state;
mod calls;
mod cast_kernels;
mod cast_rows;
mod collect;
mod comm_cast;
mod counts;
mod digests;
mod executor;
mod gathered_weights;
mod global_routing;
mod gpus;
mod groups;
mod in_flight;
mod layer;
mod losses;
mod mesh_call;
mod part;
mod passes;
mod plan_part;
mod process_group;
mod ranks;
mod raw;
mod reduce;
mod replicas;
mod routing;
mod rows;
mod settings;
mod shadow_weights;
mod shadows;
mod shard;
mod sharding;
mod sums;
mod timestamp;
mod tp_peers;
mod transfers;
mod waits;
mod weights;
mod workspace_pool;

pub(crate) use calls::RankSaved;
pub(crate) use cast_kernels::{CastKernels, CastWorkspace, counted};
pub(crate) use digests::Digested;
pub(crate) use global_routing::looks_at_all;
pub use groups::Mesh;
pub(crate) use layer::RankLayer;
pub use part::{part_of, part_of_placed, part_shape, part_shape_placed};
pub use process_group::ProcessGroup;
pub use ranks::Ranks;
pub(crate) use ranks::{PartsInFlight, floats};
pub(crate) use reduce::sum_gradients;
pub use shard::{Shard, joined, joined_placed};
pub use timestamp::Timestamp;
