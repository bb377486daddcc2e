//! What the training examples share: a handful of differentiable operations
//! in plain Rust around the MoE layers, which are moesaic's.
//!
//! Every operation has a `forward` and a `backward`. Matrices are row major
//! slices of f32, one row per token; gradients of parameters are overwritten
//! by each backward pass.

#![allow(dead_code)] // each example uses its own part

pub mod chart;
pub mod experts;
pub mod feed_forward;
pub mod gemm;
pub mod mesh_experts;
pub mod ops;
pub mod optimizer;
pub mod threads;
