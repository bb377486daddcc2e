//! Tensors in a device's memory, and their values on the host as f64.

use moesaic_kernel::DType;
use moesaic_target::Buffer;
use moesaic_tensor::{read_float, write_float};
use std::collections::BTreeMap;

/// Values by tensor or parameter.
pub type Values = BTreeMap<String, Vec<f64>>;

/// The tensors of a call by name.
pub type Memory = BTreeMap<String, Placed>;

/// A tensor in memory.
pub struct Placed {
    /// How elements are stored.
    pub dtype: DType,
    /// Where they lie.
    pub buffer: Buffer,
    /// How many elements it has.
    pub count: usize,
}

/// What a tensor holds before kernels run.
pub enum Given {
    /// A value for every element.
    Whole(Vec<f64>),
    /// Values of the first elements: whoever reads others errs.
    First(Vec<f64>),
    /// NaN, so that it shows where nothing was written.
    Nan,
    /// What the device leaves there.
    Nothing,
}

impl Given {
    /// The bytes to upload to `count` elements.
    pub fn bytes(&self, dtype: DType, count: usize) -> Vec<u8> {
        match self {
            Given::Whole(values) => {
                assert_eq!(values.len(), count, "a value for every element");
                to_bytes(dtype, values)
            }
            Given::First(values) => to_bytes(dtype, values),
            Given::Nan => vec![0xff; count * dtype.size()],
            Given::Nothing => Vec::new(),
        }
    }
}

/// Values as a device stores them.
pub fn to_bytes(dtype: DType, values: &[f64]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * dtype.size()];
    for (&value, to) in values.iter().zip(bytes.chunks_exact_mut(dtype.size())) {
        write_float(dtype, value, to);
    }
    bytes
}

/// Values that a device stored.
pub fn from_bytes(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let elements = bytes.chunks_exact(dtype.size());
    elements.map(|element| read_float(dtype, element)).collect()
}
