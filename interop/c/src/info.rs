//! Descriptions of tensors, for callers that allocate them.

use crate::tensors::{Dtype, MAX_DIMS};
use moesaic::DType;
use moesaic::kernel::Size;
use std::ffi::{CString, c_char};

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

/// A tensor whose sizes may depend on the number of tokens.
pub(crate) struct Described {
    name: CString,
    pub dtype: DType,
    pub role: Role,
    shape: Vec<Size>,
}

impl Described {
    pub(crate) fn new(name: &str, dtype: DType, role: Role, shape: Vec<Size>) -> Described {
        Described {
            name: CString::new(name).unwrap_or_default(),
            dtype,
            role,
            shape,
        }
    }

    pub fn name(&self) -> &str {
        self.name.to_str().unwrap_or_default()
    }

    pub fn shape(&self, tokens: usize) -> Vec<usize> {
        let sizes = self.shape.iter().map(|size| size.eval(tokens as u64));
        sizes.map(|size| size as usize).collect()
    }

    pub fn info(&self, tokens: usize) -> TensorInfo {
        let (own, mut shape) = (self.shape(tokens), [0; MAX_DIMS]);
        for (to, from) in shape.iter_mut().zip(&own) {
            *to = *from as i64;
        }
        TensorInfo {
            name: self.name.as_ptr(),
            dtype: self.dtype.into(),
            role: self.role,
            dims: own.len(),
            shape,
        }
    }
}
