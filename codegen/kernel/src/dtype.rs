//! Element types of tensors.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The element type of a tensor in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
    /// Two's complement, 32 bits.
    I32,
    /// Two's complement, 64 bits.
    I64,
}

impl DType {
    /// Returns the bytes per element.
    pub const fn size(self) -> usize {
        match self {
            DType::F16 | DType::Bf16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::I64 => 8,
        }
    }

    /// Returns the lower-case name used in specs, file names and kernel names.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::I64 => "i64",
        }
    }

    /// Returns whether values are floating point.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::Bf16)
    }

    /// Returns the unit roundoff of the format: half the gap between 1 and the next larger value.
    /// Zero for integers.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            DType::F32 => 1.0 / (1u64 << 24) as f64,
            DType::F16 => 1.0 / (1u64 << 11) as f64,
            DType::Bf16 => 1.0 / (1u64 << 8) as f64,
            DType::I32 | DType::I64 => 0.0,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
