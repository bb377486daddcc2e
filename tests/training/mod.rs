//! Training runs: published curves, and the examples' own models.

mod char_lm;
mod gated;
mod gates;
mod helloworld;
mod torch_random;
mod tutel;
