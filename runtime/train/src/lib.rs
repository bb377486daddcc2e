//! What training needs around a layer: optimizers over named tensors, their
//! state as a checkpoint, and checkpoints whose number of experts changes.
//!
//! ```
//! use moesaic_train::{AdamW, Optimizer, Tensor, Tensors};
//!
//! let mut weights = Tensors::from([("w".to_string(), Tensor::new(&[2], vec![1.0, -1.0]))]);
//! let gradients = Tensors::from([("w".to_string(), Tensor::new(&[2], vec![0.5, 0.0]))]);
//! let mut adam = AdamW { learning_rate: 0.1, ..AdamW::default() };
//! adam.step(&mut weights, &gradients)?;
//! assert!(weights["w"].data[0] < 1.0);
//! # Ok::<(), moesaic_train::TrainError>(())
//! ```
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

mod adam;
pub mod balance;
pub mod elastic;
mod error;
mod optimizer;
mod sgd;
mod tensor;

pub use adam::AdamW;
pub use error::TrainError;
pub use optimizer::{Optimizer, STATE_PREFIX, clip_norm, update};
pub use sgd::Sgd;
pub use tensor::{Tensor, Tensors, load, store};
