//! Training runs: published curves, and the examples' own models.

mod char_lm;
#[path = "../../examples/common/mod.rs"]
mod common;
mod digits;
mod gated;
mod gates;
mod helloworld;
mod resume;
mod torch_random;
mod tutel;
