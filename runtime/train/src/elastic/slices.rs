//! Slices of tensors along one dimension, as bytes.

use moesaic_weights::HostTensor;

/// The slices at `indices` along `axis`, in that order.
pub fn gather(tensor: &HostTensor, axis: usize, indices: &[usize]) -> HostTensor {
    let (outer, inner) = around(tensor, axis);
    let size = tensor.shape[axis];
    let mut bytes = Vec::with_capacity(outer * indices.len() * inner);
    for block in 0..outer {
        for &index in indices {
            let at = (block * size + index) * inner;
            bytes.extend_from_slice(&tensor.bytes[at..at + inner]);
        }
    }
    let mut shape = tensor.shape.clone();
    shape[axis] = indices.len();
    HostTensor {
        dtype: tensor.dtype,
        shape,
        bytes,
    }
}

/// Tensors one behind the other along `axis`; their other sizes are equal.
pub fn concat(parts: &[HostTensor], axis: usize) -> HostTensor {
    let first = &parts[0];
    let (outer, _) = around(first, axis);
    let mut bytes = Vec::with_capacity(parts.iter().map(|part| part.bytes.len()).sum());
    for block in 0..outer {
        for part in parts {
            let (_, inner) = around(part, axis);
            let length = part.shape[axis] * inner;
            bytes.extend_from_slice(&part.bytes[block * length..(block + 1) * length]);
        }
    }
    let mut shape = first.shape.clone();
    shape[axis] = parts.iter().map(|part| part.shape[axis]).sum();
    HostTensor {
        dtype: first.dtype,
        shape,
        bytes,
    }
}

/// How many blocks lie along the outer dimensions, and the bytes of one slice.
fn around(tensor: &HostTensor, axis: usize) -> (usize, usize) {
    let outer = tensor.shape[..axis].iter().product();
    let inner: usize = tensor.shape[axis + 1..].iter().product();
    (outer, inner * tensor.dtype.size())
}
