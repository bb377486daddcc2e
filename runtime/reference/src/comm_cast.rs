//! Rows in their communication dtype between nodes: the bits that the kernels of `comm_cast` write
//! and read.
//!
//! ```text
//! f16, bf16   values [width], zeros to a multiple of 16 bytes
//! fp8         codes u8 [width], zeros to a multiple of 4,
//!             scales f32 [ceil(width / 128)], zeros to a multiple of 16
//! mxfp8       codes u8 [width], zeros to a multiple of 4,
//!             scales u8 [ceil(width / 32)], zeros to a multiple of 16
//! ```

use half::{bf16, f16};
use moesaic_kernel::DType;

/// The communication dtype of rows between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommDtype {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// FP8 E4M3 with an f32 scale for each 128 values.
    Fp8,
    /// MXFP8 of OCP MX v1.0: E4M3 with an E8M0 scale for each 32 values.
    Mxfp8,
}

/// The NaN of every format decodes to this f32.
const NAN: f32 = f32::from_bits(0x7fc0_0000);

/// The largest value of E4M3.
const LARGEST_E4M3: f32 = 448.0;

/// Packs a row, and counts the values too large for f16: those that round to infinity. Other
/// formats count none.
pub fn pack_row(comm_dtype: CommDtype, row: &[f32]) -> (Vec<u8>, u64) {
    let mut bytes = Vec::new();
    let mut saturated = 0;
    match comm_dtype {
        CommDtype::F16 => {
            for &value in row {
                saturated += u64::from(value.is_finite() && value.abs() >= 65_520.0);
                bytes.extend(f16::from_f32(fitted(value, DType::F16)).to_le_bytes());
            }
        }
        CommDtype::Bf16 => {
            for &value in row {
                bytes.extend(bf16::from_f32(fitted(value, DType::Bf16)).to_le_bytes());
            }
        }
        CommDtype::Fp8 => {
            let mut scales = Vec::new();
            for span in row.chunks(128) {
                let largest = largest_of(span);
                let times = LARGEST_E4M3 / largest;
                bytes.extend(span.iter().map(|&value| to_e4m3(value * times)));
                scales.extend((largest / LARGEST_E4M3).to_le_bytes());
            }
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes.extend(scales);
        }
        CommDtype::Mxfp8 => {
            let mut scales = Vec::new();
            for span in row.chunks(32) {
                let scale = mx_exponent(span);
                let scaled = |value: &f32| (f64::from(*value) * 2f64.powi(-scale)) as f32;
                bytes.extend(span.iter().map(|value| to_e4m3(scaled(value))));
                scales.push((scale + 127) as u8);
            }
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes.extend(scales);
        }
    }
    bytes.resize(bytes.len().next_multiple_of(16), 0);
    (bytes, saturated)
}

/// Unpacks a row from `bytes`, with each value rounded to `dtype`.
pub fn unpack_row(comm_dtype: CommDtype, bytes: &[u8], width: usize, dtype: DType) -> Vec<f32> {
    let half = |i: usize| u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]);
    let value = |i: usize| match comm_dtype {
        CommDtype::F16 => f16::from_bits(half(i)).to_f32(),
        CommDtype::Bf16 => bf16::from_bits(half(i)).to_f32(),
        CommDtype::Fp8 => {
            let at = width.next_multiple_of(4) + 4 * (i / 128);
            let scale = [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
            let value = of_e4m3(bytes[i]) * f32::from_le_bytes(scale);
            // E4M3 has no infinity, so an infinite product means a value too large for f32.
            value.clamp(-f32::MAX, f32::MAX)
        }
        CommDtype::Mxfp8 => {
            let exponent = i32::from(bytes[width.next_multiple_of(4) + i / 32]) - 127;
            (f64::from(of_e4m3(bytes[i])) * 2f64.powi(exponent)) as f32
        }
    };
    let rounded = |i: usize| rounded(fitted(value(i), dtype), dtype);
    (0..width).map(rounded).collect()
}

/// Returns the exponent of a span's E8M0 scale: that of the largest finite magnitude less that of
/// 256, the largest power of two of E4M3, as section 6.3 of OCP MX v1.0 says; at least -127.
fn mx_exponent(span: &[f32]) -> i32 {
    let finite = span.iter().filter(|value| value.is_finite());
    let largest = finite.fold(0f64, |most, value| most.max(f64::from(value.abs())));
    // The exponent of a zero is that of no other f64, and far below the least of E8M0.
    let binade = (largest.to_bits() >> 52) as i32 - 1023;
    (binade - 8).max(-127)
}

/// Returns the largest finite magnitude of a span, which sets its scale. Magnitudes below 2^-117
/// count as that, because 448 divided by a smaller one would overflow f32.
fn largest_of(span: &[f32]) -> f32 {
    let finite = span.iter().filter(|value| value.is_finite());
    finite.fold(2f32.powi(-117), |most, value| most.max(value.abs()))
}

/// Clamps a finite value to the largest of its type.
fn fitted(value: f32, dtype: DType) -> f32 {
    let largest = match dtype {
        DType::F16 => f16::MAX.to_f32(),
        DType::Bf16 => bf16::MAX.to_f32(),
        _ => f32::MAX,
    };
    match value {
        _ if value.is_nan() => NAN,
        _ if value.is_infinite() => value,
        _ => value.clamp(-largest, largest),
    }
}

fn rounded(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::Bf16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Returns the code of the nearest value of E4M3, ties to the even code, or NaN's code for
/// infinities and NaN.
pub fn to_e4m3(value: f32) -> u8 {
    if !value.is_finite() {
        return 0x7f;
    }
    let sign = u8::from(value.is_sign_negative()) << 7;
    let size = f64::from(value.abs()).min(f64::from(LARGEST_E4M3));
    // Each binade from 2^-6 on has eight codes; below it, codes are evenly spaced.
    let binade = (size.to_bits() >> 52) as i32 - 1023;
    let exponent = binade.max(-6);
    let steps = (size * 2f64.powi(3 - exponent)).round_ties_even();
    sign | (8 * (exponent + 6) + steps as i32) as u8
}

/// Returns the value of a code of E4M3.
pub fn of_e4m3(code: u8) -> f32 {
    let (exponent, steps) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match exponent {
        _ if code & 0x7f == 0x7f => return NAN,
        0 => steps * 2f32.powi(-9),
        _ => (8.0 + steps) * 2f32.powi(exponent - 10),
    };
    if code & 0x80 == 0 { size } else { -size }
}
