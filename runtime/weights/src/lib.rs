//! Checkpoints in, canonical tensors out.
//!
//! [`Checkpoint`] maps safetensors files into memory: one file, or a model
//! directory with or without an index. [`load_canonical`] reads a file with
//! canonical names, [`load_import`] carries out the recipes of a Hugging Face
//! import, [`load_keys`] those of other libraries; all give [`HostWeights`], every tensor in canonical shape and in
//! the element type of the spec. [`write_safetensors`] writes results in one
//! piece or not at all.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

mod checkpoint;
mod error;
mod host;
mod keys;
mod load;
mod view;
mod write;

pub use checkpoint::{Checkpoint, TensorRef};
pub use error::WeightsError;
pub use host::{HostTensor, HostWeights};
pub use keys::{KeyOptions, load_keys};
pub use load::{LoadOptions, load_canonical, load_import, load_sources};
pub use write::{write_safetensors, write_whole};
