//! The declarative layer spec: what a user may ask for.
//!
//! [`LayerSpec`] is plain data with every axis of a published MoE layer.
//! Reading TOML and Hugging Face configurations, validation and the list of
//! weight tensors live beside it; nothing here touches a file or a device.

mod tensors;
mod types;

pub use tensors::{TensorSpec, canonical_tensors};
pub use types::*;
