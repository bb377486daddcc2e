//! Tensors of f32, as optimizers use them.

use moesaic_kernel::DType;
use moesaic_weights::{HostTensor, HostWeights};
use std::collections::BTreeMap;

/// A dense tensor of f32.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Sizes, outermost first; row major.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: Vec<f32>,
}

/// Tensors by name.
pub type Tensors = BTreeMap<String, Tensor>;

impl Tensor {
    /// A tensor of these elements.
    ///
    /// # Panics
    /// When there are more or fewer elements than the shape says.
    pub fn new(shape: &[usize], data: Vec<f32>) -> Tensor {
        let elements: usize = shape.iter().product();
        assert_eq!(data.len(), elements, "elements of a tensor of {shape:?}");
        Tensor {
            shape: shape.to_vec(),
            data,
        }
    }

    /// A tensor of zeros.
    pub fn zeros(shape: &[usize]) -> Tensor {
        Tensor::new(shape, vec![0.0; shape.iter().product()])
    }
}

/// The floating-point tensors of a checkpoint as f32 master copies; integer
/// tensors, such as a routing table, are not trained and left out.
pub fn load(weights: &HostWeights) -> Tensors {
    let floats = weights
        .iter()
        .filter(|(_, tensor)| !matches!(tensor.dtype, DType::I32 | DType::I64));
    floats
        .map(|(name, tensor)| {
            let data = tensor.to_f64().iter().map(|v| *v as f32).collect();
            (name.clone(), Tensor::new(&tensor.shape, data))
        })
        .collect()
}

/// Tensors as a checkpoint of f32, to be written as safetensors.
pub fn store(tensors: &Tensors) -> HostWeights {
    let each = tensors.iter();
    each.map(|(name, tensor)| {
        (
            name.clone(),
            HostTensor::from_f32(&tensor.shape, &tensor.data),
        )
    })
    .collect()
}
