//! Predictions of a step of a whole model: layers with experts and what is around them, over
//! pipeline stages.
//!
//! A layer with experts is simulated as for a layer alone ([`crate::search`]). Everything around it
//! is counted: GEMMs by their arithmetic, other kernels by their memory traffic, collectives by
//! their bytes. docs/SCALE.md lists what is assumed.

mod around;
mod check;
mod collective;
mod evaluate;
mod layer;
mod memory;
mod ranking;
mod scenario;
mod search;
mod sensitivity;
mod stages;
mod timeline;

pub use check::{ModelMeshError, check_mesh};
pub use evaluate::predict_model;
pub use ranking::{ModelTies, TieRule};
pub use scenario::{
    Batch, ModelMesh, ModelPrediction, ModelScenario, RecomputeLevel, StageMemory, StateBytes,
    StepOrder, StepPhase, default_reserve,
};
pub use search::{ModelRanked, ModelSpace, search_model};
pub use sensitivity::{Doubled, Faster, NoSuchPart, at_speed, doubled, faster};
pub use timeline::model_timeline;

#[cfg(test)]
mod tests;
