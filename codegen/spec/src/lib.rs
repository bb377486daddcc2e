//! The declarative layer spec.
//!
//! [`LayerSpec`] is plain data with every axis of a published MoE layer. Beside it live the readers
//! of TOML and of Hugging Face configurations, validation, and the list of weight tensors. Nothing
//! here touches a file or a device.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

#![warn(missing_debug_implementations)]

mod activation;
mod around;
mod biases;
mod capacity;
mod diagnostic;
pub mod expression;
pub mod format;
pub mod gguf;
pub mod hf;
mod indices;
pub mod keys;
mod limits;
mod loss;
#[cfg(test)]
mod reference;
mod router_kind;
mod schema;
mod suggest;
mod tensors;
#[doc(hidden)]
pub mod testing;
mod text;
mod types;
mod validate;
mod weight_format;
mod write;

pub use activation::{Activation, ClampSite};
pub use around::{Latent, SharedExpert, SharedGate};
pub use biases::Biases;
pub use capacity::{Capacity, CapacityMode, CapacityOrder, FactorError};
pub use diagnostic::{Problem, Related, SpecError};
pub use expression::{Expression, ExpressionError};
pub use indices::{IndexError, IndexRange};
pub use limits::*;
pub use loss::*;
pub use router_kind::{
    Chooser, LogitsDef, LogitsFormula, RouterAxis, RouterDef, RouterKind, RouterSize, RouterWeight,
    WeightStart,
};
pub use suggest::closest;
pub use tensors::{
    TensorSpec, UnknownWeight, canonical_tensors, check_weight_name, gradient_dtype,
};
pub use types::*;
pub use weight_format::{
    FormatTensor, OffsetType, WEIGHT_FORMAT_NAMES, WEIGHT_FORMATS, WeightCode, WeightFormat,
};
