//! Tensors in host memory: a dtype, a shape, and bytes that are owned, borrowed,
//! or mapped from a file.
//!
//! [`Tensors`] are tensors by name: weights, inputs, results, gradients, optimizer state. A
//! [`WeightSource`] hands a layer its weights a few rows at a time; tensors in memory are one, a
//! checkpoint is another. A [`WeightSink`] takes tensors in the same way.
//!
//! ```
//! use moesaic_tensor::{Tensor, Tensors};
//!
//! let router = vec![0.5f32; 8 * 64];
//! let weights = Tensors::new().with("router.weight", &[8, 64], &router);
//! assert_eq!(weights["router.weight"].shape, [8, 64]);
//! assert_eq!(Tensor::owned(&[2], vec![1i32, 2]).to_f64(), [1.0, 2.0]);
//! ```
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

#![warn(missing_debug_implementations)]

mod bytes;
mod element;
mod map;
mod sink;
mod source;
mod tensor;
mod tensors;

pub use bytes::Bytes;
pub use element::{
    Element, read_float, read_int, round_float, widen_floats, write_f32s, write_float,
};
pub use map::Map;
pub use sink::{Described, WeightSink};
pub use source::{SourceError, WeightSource};
pub use tensor::{Tensor, TensorError, TensorKind, check_kind};
pub use tensors::Tensors;
