//! Tensors in a device's memory, and their values on the host as f64.

use half::{bf16, f16};
use moesaic_kernel::DType;
use moesaic_target::Buffer;
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
    let each = |f: &dyn Fn(f64) -> Vec<u8>| values.iter().flat_map(|&v| f(v)).collect();
    match dtype {
        DType::F32 => each(&|v| (v as f32).to_le_bytes().to_vec()),
        DType::F16 => each(&|v| f16::from_f64(v).to_le_bytes().to_vec()),
        DType::Bf16 => each(&|v| bf16::from_f64(v).to_le_bytes().to_vec()),
        DType::I32 => each(&|v| (v as i32).to_le_bytes().to_vec()),
        DType::I64 => each(&|v| (v as i64).to_le_bytes().to_vec()),
    }
}

/// Values that a device stored.
pub fn from_bytes(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let chunks = bytes.chunks_exact(dtype.size());
    match dtype {
        DType::F32 => chunks
            .map(|c| f32::from_le_bytes(c.try_into().unwrap()).into())
            .collect(),
        DType::F16 => chunks
            .map(|c| f16::from_le_bytes(c.try_into().unwrap()).into())
            .collect(),
        DType::Bf16 => chunks
            .map(|c| bf16::from_le_bytes(c.try_into().unwrap()).into())
            .collect(),
        DType::I32 => chunks
            .map(|c| i32::from_le_bytes(c.try_into().unwrap()).into())
            .collect(),
        DType::I64 => chunks
            .map(|c| i64::from_le_bytes(c.try_into().unwrap()) as f64)
            .collect(),
    }
}
