//! Tensors in host memory.

use half::{bf16, f16};
use moesaic_kernel::DType;
use std::collections::BTreeMap;

/// A dense tensor in host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostTensor {
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first; row major.
    pub shape: Vec<usize>,
    /// Elements, little endian.
    pub bytes: Vec<u8>,
}

impl HostTensor {
    /// A tensor of f32 values.
    pub fn from_f32(shape: &[usize], values: &[f32]) -> HostTensor {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        HostTensor {
            dtype: DType::F32,
            shape: shape.to_vec(),
            bytes,
        }
    }

    /// A tensor of i32 values.
    pub fn from_i32(shape: &[usize], values: &[i32]) -> HostTensor {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        HostTensor {
            dtype: DType::I32,
            shape: shape.to_vec(),
            bytes,
        }
    }

    /// A tensor of i64 values.
    pub fn from_i64(shape: &[usize], values: &[i64]) -> HostTensor {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        HostTensor {
            dtype: DType::I64,
            shape: shape.to_vec(),
            bytes,
        }
    }

    /// The values as f64: exact for floats, exact below 2⁵³ for integers.
    pub fn to_f64(&self) -> Vec<f64> {
        self.bytes
            .chunks_exact(self.dtype.size())
            .map(|b| read_float(self.dtype, b))
            .collect()
    }
}

/// Tensors by canonical name.
pub type HostWeights = BTreeMap<String, HostTensor>;

/// The value of one element of exactly `dtype.size()` bytes.
pub(crate) fn read_float(dtype: DType, b: &[u8]) -> f64 {
    match dtype {
        DType::F32 => f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        DType::F16 => f16::from_le_bytes([b[0], b[1]]).to_f64(),
        DType::Bf16 => bf16::from_le_bytes([b[0], b[1]]).to_f64(),
        DType::I32 | DType::I64 => read_int(dtype, b) as f64,
    }
}

/// The value of one integer element; zero for floats.
pub(crate) fn read_int(dtype: DType, b: &[u8]) -> i64 {
    match dtype {
        DType::I32 => i64::from(i32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        DType::I64 => i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]),
        DType::F32 | DType::F16 | DType::Bf16 => 0,
    }
}

/// Stores a float: nearest, ties to even.
pub(crate) fn write_float(dtype: DType, value: f64, out: &mut [u8]) {
    match dtype {
        DType::F32 => out.copy_from_slice(&(value as f32).to_le_bytes()),
        DType::F16 => out.copy_from_slice(&f16::from_f64(value).to_le_bytes()),
        DType::Bf16 => out.copy_from_slice(&bf16::from_f64(value).to_le_bytes()),
        DType::I32 => out.copy_from_slice(&(value as i32).to_le_bytes()),
        DType::I64 => out.copy_from_slice(&(value as i64).to_le_bytes()),
    }
}
