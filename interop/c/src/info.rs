//! Descriptions of tensors, for callers that allocate them.

use crate::tensors::{Dtype, MAX_DIMS};
use moesaic::{DType, LayerTensorRole};
use std::ffi::{CStr, c_char};

/// The owner of a tensor, and its readers.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// You give it at every call: "x", and what the spec's router reads.
    Input = 0,
    /// You give it once, or bind it.
    Weight = 1,
    /// A call writes it if you name it: "y", "topk_ids", "topk_weights", "counts".
    Output = 2,
    /// You give it at every backward pass: "dy".
    OutputGradient = 3,
    /// Backward writes it if you name it: "dx", "grad.topk_weights".
    InputGradient = 4,
    /// Backward writes it: "grad." and the name of a weight.
    WeightGradient = 5,
}

/// A tensor that a spec or a layer has.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TensorInfo {
    /// The canonical name. Valid as long as the spec or the layer.
    pub name: *const c_char,
    /// The type of the elements.
    pub dtype: Dtype,
    /// The owner.
    pub role: Role,
    /// The number of sizes.
    pub dims: usize,
    /// The sizes, outermost first; those after `dims` are 0.
    pub shape: [i64; MAX_DIMS],
}

impl From<LayerTensorRole> for Role {
    fn from(role: LayerTensorRole) -> Role {
        match role {
            LayerTensorRole::Input => Role::Input,
            LayerTensorRole::Weight => Role::Weight,
            LayerTensorRole::Output => Role::Output,
            LayerTensorRole::OutputGradient => Role::OutputGradient,
            LayerTensorRole::InputGradient => Role::InputGradient,
            LayerTensorRole::WeightGradient => Role::WeightGradient,
        }
    }
}

impl TensorInfo {
    /// Describes a tensor, whose name must live as long as the spec or the layer.
    pub(crate) fn new(name: &CStr, dtype: DType, role: Role, sizes: &[usize]) -> TensorInfo {
        let mut shape = [0; MAX_DIMS];
        for (to, from) in shape.iter_mut().zip(sizes) {
            *to = *from as i64;
        }
        TensorInfo {
            name: name.as_ptr(),
            dtype: dtype.into(),
            role,
            dims: sizes.len(),
            shape,
        }
    }
}
