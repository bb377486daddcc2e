//! Elements: the Rust types that have a dtype, and conversions between dtypes.

use half::{bf16, f16};
use moesaic_kernel::DType;

/// A Rust type that has a [`DType`].
pub trait Element: bytemuck::Pod {
    /// The corresponding dtype in kernels and files.
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for f16 {
    const DTYPE: DType = DType::F16;
}
impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;
}
impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
impl Element for i64 {
    const DTYPE: DType = DType::I64;
}

/// Reads one element of exactly `dtype.size()` bytes. The result is exact for floats, and for
/// integers below 2⁵³.
pub fn read_float(dtype: DType, b: &[u8]) -> f64 {
    match dtype {
        DType::F32 => f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        DType::F16 => f16::from_le_bytes([b[0], b[1]]).to_f64(),
        DType::Bf16 => bf16::from_le_bytes([b[0], b[1]]).to_f64(),
        DType::I32 | DType::I64 => read_int(dtype, b) as f64,
    }
}

/// Widens floats to f32 in bytes, as [`read_float`] does, but faster for many. Integers are not
/// converted.
pub fn widen_floats(dtype: DType, bytes: &[u8], out: &mut [u8]) {
    let pairs = bytes
        .as_chunks::<2>()
        .0
        .iter()
        .zip(out.as_chunks_mut::<4>().0);
    match dtype {
        DType::F32 => out.copy_from_slice(bytes),
        DType::Bf16 => pairs.for_each(|(b, out)| *out = [0, 0, b[0], b[1]]),
        DType::F16 => {
            pairs.for_each(|(b, out)| *out = f16::from_le_bytes(*b).to_f32().to_le_bytes())
        }
        DType::I32 | DType::I64 => {}
    }
}

/// Reads one integer element; zero for floats.
pub fn read_int(dtype: DType, b: &[u8]) -> i64 {
    match dtype {
        DType::I32 => i64::from(i32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        DType::I64 => i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]),
        DType::F32 | DType::F16 | DType::Bf16 => 0,
    }
}

/// Stores a value in `dtype.size()` bytes. Floats round to nearest, ties to even.
pub fn write_float(dtype: DType, value: f64, out: &mut [u8]) {
    match dtype {
        DType::F32 => out.copy_from_slice(&(value as f32).to_le_bytes()),
        DType::F16 => out.copy_from_slice(&f16::from_f64(seen(value)).to_le_bytes()),
        DType::Bf16 => out.copy_from_slice(&bf16::from_f64(seen(value)).to_le_bytes()),
        DType::I32 => out.copy_from_slice(&(value as i32).to_le_bytes()),
        DType::I64 => out.copy_from_slice(&(value as i64).to_le_bytes()),
    }
}

/// Stores values in `dtype.size()` bytes each, as [`write_float`] does, but faster for many.
pub fn write_f32s(dtype: DType, values: &[f32], out: &mut [u8]) {
    let pairs = values.iter().zip(out.chunks_exact_mut(dtype.size()));
    match dtype {
        DType::F32 => pairs.for_each(|(v, out)| out.copy_from_slice(&v.to_le_bytes())),
        DType::F16 => {
            pairs.for_each(|(v, out)| out.copy_from_slice(&f16::from_f32(*v).to_le_bytes()))
        }
        DType::Bf16 => {
            pairs.for_each(|(v, out)| out.copy_from_slice(&bf16::from_f32(*v).to_le_bytes()))
        }
        DType::I32 | DType::I64 => {
            pairs.for_each(|(v, out)| write_float(dtype, f64::from(*v), out))
        }
    }
}

/// Returns the value of a float after storing it: rounded to nearest, ties to even. For an integer
/// type it returns the value itself.
pub fn round_float(dtype: DType, value: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(value as f32),
        DType::F16 => f16::from_f64(seen(value)).to_f64(),
        DType::Bf16 => bf16::from_f64(seen(value)).to_f64(),
        DType::I32 | DType::I64 => value,
    }
}

/// Prepares a value for [`half`], which would round twice: it rounds to f32 first, or looks only at
/// the upper half of the bits, and so mistakes a value just beside the middle of two numbers for
/// the middle. Here the lower half becomes one sticky bit, which an f32 keeps.
fn seen(value: f64) -> f64 {
    let bits = value.to_bits();
    let below = u64::from(bits as u32 != 0) << 32;
    f64::from_bits(bits >> 32 << 32 | below)
}
