//! The mesh: how the ranks of a job share a layer, and which of its tokens rules look at.

mod adaptive;
mod parallel;
mod scope;

pub use adaptive::AdaptiveMesh;
pub use parallel::{MeshError, Parallel, RankCoords, SharedExperts};
pub use scope::TokenScope;
