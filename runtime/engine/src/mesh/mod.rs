//! Layers whose experts live on many ranks.
//!
//! [`Mesh`] is a rank's place among the others and the groups that it exchanges with,
//! [`MeshLayer`] what a rank runs of a layer: the steps of a
//! [`RankPlan`](moesaic_plan::RankPlan), launches and exchanges in one list.

mod any;
mod calls;
mod collect;
mod counts;
mod gpus;
mod groups;
mod layer;
mod lent;
mod losses;
mod moment;
mod neighbours;
mod part;
mod passes;
mod ranks;
mod raw;
mod reduce;
mod replicas;
mod route;
mod routing;
mod rows;
mod run;
mod settings;
mod shadows;
mod shard;
mod share;
mod side;
mod sums;
mod under_way;
mod view;
mod weights;
mod wire;

pub use any::{AnyLayer, AnySaved};
pub use calls::MeshSaved;
pub use groups::Mesh;
pub use layer::MeshLayer;
pub use moment::Moment;
pub use part::{part_of, part_of_placed, part_shape, part_shape_placed};
pub use ranks::{Among, Ranks};
pub use shard::{Shard, joined, joined_placed};
