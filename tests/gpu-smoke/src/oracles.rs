//! Layers as other projects compute them.

#[path = "../../oracle/gradients.rs"]
pub mod gradients;
#[path = "../../oracle/layers.rs"]
pub mod layers;
