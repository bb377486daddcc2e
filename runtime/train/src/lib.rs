//! Training tools around a layer: optimizers over named tensors, their state as a checkpoint, steps
//! over many ranks, and checkpoints whose number of experts changes.
//!
//! ```
//! use moesaic_tensor::{Tensor, Tensors};
//! use moesaic_train::{AdamW, Optimizer};
//!
//! let mut weights = Tensors::from([("w", Tensor::owned(&[2], vec![1.0f32, -1.0]))]);
//! let gradients = Tensors::new().with("w", &[2], &[0.5f32, 0.0]);
//! let mut adam = AdamW { learning_rate: 0.1, ..AdamW::default() };
//! adam.step(&mut weights, &gradients)?;
//! assert!(weights["w"].to_f32()[0] < 1.0);
//! # Ok::<(), moesaic_train::TrainError>(())
//! ```
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

#![warn(missing_debug_implementations)]

mod adam;
pub mod balance;
pub mod elastic;
mod error;
mod gated;
pub mod gates;
pub mod mesh;
pub mod migrate;
mod optimizer;
pub mod replay;
mod sgd;

pub use adam::AdamW;
pub use error::TrainError;
pub use gated::{Gate, GateBackward, GatedLayer, GatedSaved};
pub use optimizer::{Optimizer, STATE_PREFIX, clip_norm, masters, set_weights, update};
pub use sgd::Sgd;
