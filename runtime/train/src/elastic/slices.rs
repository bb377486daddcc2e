//! Slices of tensors along one dimension, as bytes.

use moesaic_tensor::Tensor;

/// Returns the slices at `indices` along `axis`, in that order.
pub fn gather(tensor: &Tensor<'_>, axis: usize, indices: &[usize]) -> Tensor<'static> {
    let (outer, inner) = around(tensor, axis);
    let size = tensor.shape[axis];
    let mut shape = tensor.shape.clone();
    shape[axis] = indices.len();
    let mut gathered = Tensor::zeros(tensor.dtype, &shape);
    let slices = (0..outer).flat_map(|block| indices.iter().map(move |i| block * size + i));
    let to = gathered.data.to_mut().chunks_exact_mut(inner.max(1));
    for (to, slice) in to.zip(slices) {
        to.copy_from_slice(&tensor.data[slice * inner..(slice + 1) * inner]);
    }
    gathered
}

/// Concatenates tensors along `axis`; their other sizes are equal.
pub fn concat(parts: &[Tensor<'_>], axis: usize) -> Tensor<'static> {
    let first = &parts[0];
    let (outer, _) = around(first, axis);
    let mut shape = first.shape.clone();
    shape[axis] = parts.iter().map(|part| part.shape[axis]).sum();
    let mut joined = Tensor::zeros(first.dtype, &shape);
    let mut to = joined.data.to_mut();
    for block in 0..outer {
        for part in parts {
            let (_, inner) = around(part, axis);
            let length = part.shape[axis] * inner;
            let (own, rest) = to.split_at_mut(length);
            own.copy_from_slice(&part.data[block * length..(block + 1) * length]);
            to = rest;
        }
    }
    joined
}

/// Returns the number of blocks along the outer dimensions, and the bytes of one slice.
fn around(tensor: &Tensor<'_>, axis: usize) -> (usize, usize) {
    let outer = tensor.shape[..axis].iter().product();
    let inner: usize = tensor.shape[axis + 1..].iter().product();
    (outer, inner * tensor.dtype.size())
}
