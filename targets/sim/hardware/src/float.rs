//! Conversions between f32 and the narrow formats, as the hardware rounds.
//!
//! Conversions round to nearest, ties to even, unless the name says otherwise.
//! A NaN becomes the canonical NaN of PTX, all ones below the sign; only
//! [`tf32_from_f32_rna`] keeps the upper bits of a NaN.

/// The NaN that conversions to f16 and bf16 return.
pub const NAN16: u16 = 0x7fff;
/// The NaN that tf32 conversion instructions of the GPU return.
pub const NAN32: u32 = 0x7fff_ffff;

/// Returns the value of bf16 bits.
#[inline]
pub const fn f32_from_bf16(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Converts f32 to bf16.
#[inline]
pub const fn bf16_from_f32(value: f32) -> u16 {
    if value.is_nan() {
        return NAN16;
    }
    let bits = value.to_bits();
    // A carry out of the mantissa steps the exponent, up to infinity.
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Converts f32 to bf16, rounding towards zero.
#[inline]
pub const fn bf16_from_f32_rz(value: f32) -> u16 {
    if value.is_nan() {
        return NAN16;
    }
    (value.to_bits() >> 16) as u16
}

/// Returns the value of f16 bits.
#[inline(always)]
pub const fn f32_from_f16(bits: u16) -> f32 {
    let sign = ((bits & 0x8000) as u32) << 16;
    let magnitude = ((bits & 0x7fff) as u32) << 13;
    // The exponent's bias differs by 112; exact for subnormals as well.
    let scaled = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
    let top = if magnitude >= 0x7c00 << 13 {
        0x7f80_0000
    } else {
        0
    };
    f32::from_bits(sign | scaled | top)
}

/// Converts f32 to f16; values beyond 65504 become infinity.
#[inline]
pub const fn f16_from_f32(value: f32) -> u16 {
    if value.is_nan() {
        return NAN16;
    }
    let bits = value.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    sign | f16_magnitude(bits & 0x7fff_ffff)
}

/// Returns the f16 bits of a magnitude below NaN.
const fn f16_magnitude(bits: u32) -> u16 {
    let exponent = (bits >> 23) as i32 - 127;
    if exponent >= 16 {
        return 0x7c00;
    }
    if exponent >= -14 {
        let rounded = round_shift(bits, 13);
        return (rounded - (112 << 10)) as u16;
    }
    if exponent < -25 {
        return 0;
    }
    let mantissa = (bits & 0x7f_ffff) | 0x80_0000;
    round_shift(mantissa, (-1 - exponent) as u32) as u16
}

/// Returns `bits / 2^shift`, to nearest, ties to even; `shift` is 1 to 31.
const fn round_shift(bits: u32, shift: u32) -> u32 {
    let half = 1 << (shift - 1);
    let odd = (bits >> shift) & 1;
    (bits + half - 1 + odd) >> shift
}

/// Converts f32 to tf32 to nearest, ties away from zero (`cvt.rna`). The low 13
/// bits of the result are zero, which splitting an f32 into two tf32 relies on.
///
/// GPUs have no instruction for this rounding. ptxas emits an addition for
/// finite values and clears the low bits of every value, so a NaN keeps its
/// upper bits, and a NaN without upper bits becomes infinity.
#[inline]
pub const fn tf32_from_f32_rna(value: f32) -> u32 {
    let bits = value.to_bits();
    if value.is_finite() {
        (bits + 0x1000) & !0x1fff
    } else {
        bits & !0x1fff
    }
}

/// Converts f32 to tf32 to nearest, ties to even (`cvt.rn`).
#[inline]
pub const fn tf32_from_f32_rn(value: f32) -> u32 {
    let bits = value.to_bits();
    if value.is_nan() {
        NAN32
    } else {
        (bits + 0xfff + ((bits >> 13) & 1)) & !0x1fff
    }
}

/// Converts f32 to tf32 towards zero (`cvt.rz`).
#[inline]
pub const fn tf32_from_f32_rz(value: f32) -> u32 {
    if value.is_nan() {
        NAN32
    } else {
        value.to_bits() & !0x1fff
    }
}

/// Returns the value that a tensor core reads from a 32-bit tf32 register: it
/// ignores the low 13 bits.
#[inline]
pub const fn f32_from_tf32(bits: u32) -> f32 {
    f32::from_bits(bits & !0x1fff)
}

/// Returns the value of e4m3 bits: no infinities, one NaN per sign.
#[inline]
pub const fn f32_from_e4m3(bits: u8) -> f32 {
    if bits & 0x7f == 0x7f {
        return f32::NAN;
    }
    small_float(bits, 3, 7)
}

/// Returns the value of e5m2 bits, which are the upper half of an f16.
#[inline]
pub const fn f32_from_e5m2(bits: u8) -> f32 {
    f32_from_f16((bits as u16) << 8)
}

const fn small_float(bits: u8, mantissa_bits: u32, bias: i32) -> f32 {
    let exponent = ((bits & 0x7f) >> mantissa_bits) as i32;
    let mantissa = (bits & ((1 << mantissa_bits) - 1)) as u32;
    let (mantissa, exponent) = match exponent {
        0 => (mantissa, 1 - bias),
        _ => (mantissa | (1 << mantissa_bits), exponent - bias),
    };
    let scale = f32::from_bits(((127 + exponent - mantissa_bits as i32) as u32) << 23);
    let magnitude = mantissa as f32 * scale;
    if bits & 0x80 != 0 {
        -magnitude
    } else {
        magnitude
    }
}

#[cfg(test)]
#[path = "float_tests.rs"]
mod tests;
