//! The matrices of routed experts among the tensors of a layer.

use moesaic_spec::{LayerSpec, TensorSpec, canonical_tensors};

/// Returns the name without its end of a matrix of routed experts: `experts.up`.
pub(crate) fn matrix_of(name: &str) -> Option<&str> {
    let (matrix, end) = name.rsplit_once('.')?;
    let known = ["experts.gate", "experts.up", "experts.down"].contains(&matrix);
    (known && end != "bias").then_some(matrix)
}

/// Returns the tensors with matrices of numbers in place of the tensors of codes.
pub(crate) fn numbers_of(spec: &LayerSpec, tensors: &[TensorSpec]) -> Vec<TensorSpec> {
    let plain = canonical_tensors(&spec.dequantized());
    let number = |tensor: &TensorSpec| {
        if matrix_of(&tensor.name).is_none() {
            return Some(tensor.clone());
        }
        let mut number = plain
            .iter()
            .find(|plain| plain.name == tensor.name)?
            .clone();
        // The tensors may be those of some experts.
        number.shape[0] = tensor.shape[0];
        Some(number)
    };
    tensors.iter().filter_map(number).collect()
}
