//! Between the crates that hold tensors: a loaded checkpoint becomes an
//! engine's weights, or the reference's.

use moesaic_engine::{HostTensor, Weights};
#[cfg(feature = "reference")]
use moesaic_reference as reference;
use moesaic_weights::HostWeights;
use std::borrow::Cow;

/// The tensors of a checkpoint as an engine takes them, without a copy.
pub fn engine_weights(loaded: &HostWeights) -> Weights<'_> {
    let mut weights = Weights::new();
    for (name, tensor) in loaded {
        let data = Cow::Borrowed(tensor.bytes.as_slice());
        let shape = tensor.shape.clone();
        weights.insert(
            name,
            HostTensor {
                dtype: tensor.dtype,
                shape,
                data,
            },
        );
    }
    weights
}

#[cfg(feature = "reference")]
/// The tensors of a checkpoint as the f64 reference takes them.
pub fn reference_weights(loaded: &HostWeights) -> reference::Weights {
    let tensors = loaded.iter().map(|(name, tensor)| {
        let data = tensor.to_f64();
        (
            name.clone(),
            reference::Tensor {
                shape: tensor.shape.clone(),
                data,
            },
        )
    });
    reference::Weights(tensors.collect())
}
