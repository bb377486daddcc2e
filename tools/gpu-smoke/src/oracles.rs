//! Layers as other projects compute them.

#[path = "../../../tests/oracle/gradients.rs"]
pub mod gradients;
#[path = "../../../tests/oracle/layers.rs"]
pub mod layers;
