//! The shared part of the training examples: a few differentiable operations in plain Rust around
//! moesaic's MoE layers.
//!
//! Every operation has a `forward` and a `backward`. Matrices are row-major slices of f32 with one
//! row per token. Each backward pass overwrites the gradients of parameters.

#![allow(dead_code)] // each example uses its own part

pub mod chart;
pub mod experts;
pub mod feed_forward;
pub mod gemm;
pub mod mesh_experts;
pub mod ops;
pub mod optimizer;
pub mod threads;
