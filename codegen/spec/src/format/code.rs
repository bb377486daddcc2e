//! Decoding tables of codes of up to 8 bits, and of scales.

/// FP8 E4M3 (OCP, `e4m3fn`): 4 exponent bits with bias 7, 3 mantissa bits and no infinities; all
/// ones is NaN.
pub static E4M3: [f32; 256] = {
    let mut values = [0f32; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = e4m3(code as u32);
        code += 1;
    }
    values
};

/// FP8 E5M2 (OCP): the high byte of an f16, so it has infinities.
pub static E5M2: [f32; 256] = {
    let mut values = [0f32; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = f16((code as u16) << 8);
        code += 1;
    }
    values
};

/// FP6 E2M3 (OCP); bit 5 is the sign.
pub static E2M3: [f32; 64] = {
    let mut values = [0f32; 64];
    let mut code = 0;
    while code < 64 {
        values[code] = E4M3[e2m3_as_e4m3(code as u8) as usize];
        code += 1;
    }
    values
};

/// Returns the E4M3 code of the number that an E2M3 code stands for. E4M3 has as many mantissa bits
/// and smaller exponents, so each number has one, subnormal ones a normal one.
pub const fn e2m3_as_e4m3(code: u8) -> u8 {
    let (sign, exponent, mantissa) = ((code >> 5) & 1, (code >> 3) & 3, code & 7);
    let size = match (exponent, mantissa) {
        (0, 0) => 0,
        (0, 1) => 4 << 3,
        (0, 2..4) => 5 << 3 | (mantissa & 1) << 2,
        (0, _) => 6 << 3 | (mantissa & 3) << 1,
        // The biases are 1 and 7.
        _ => (exponent + 6) << 3 | mantissa,
    };
    sign << 7 | size
}

/// FP4 E2M1 (OCP); bit 3 is the sign.
pub static E2M1: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

const fn e4m3(code: u32) -> f32 {
    let (sign, exponent, mantissa) = (code >> 7, (code >> 3) & 15, code & 7);
    let size = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        // Subnormal: steps of 2^-9 below the smallest normal number, 2^-6.
        (0, _) => mantissa as f32 / 512.0,
        _ => f32::from_bits(((exponent + 120) << 23) | (mantissa << 20)),
    };
    if sign == 1 { -size } else { size }
}

/// Returns 2^(code - 127), E8M0 (OCP); 255 is NaN.
pub const fn e8m0(code: u8) -> f32 {
    match code {
        // 2^-127 is subnormal in f32.
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits((code as u32) << 23),
    }
}

/// Widens the bits of an f16, exactly.
pub const fn f16(bits: u16) -> f32 {
    let (sign, exponent, mantissa) = (
        (bits as u32 & 0x8000) << 16,
        (bits as u32 >> 10) & 31,
        bits as u32 & 0x3ff,
    );
    let size = match exponent {
        // Subnormal: steps of 2^-24 below the smallest normal number, 2^-14.
        0 => (mantissa as f32 / 16_777_216.0).to_bits(),
        31 => 0x7f80_0000 | (mantissa << 13),
        _ => ((exponent + 112) << 23) | (mantissa << 13),
    };
    f32::from_bits(sign | size)
}

/// Widens the bits of a bf16, exactly.
pub const fn bf16(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// A float of up to 16 bits, by the parameters of its format.
#[derive(Clone, Copy, Debug)]
pub(super) struct SmallFloat {
    /// Bits of the mantissa.
    mantissa: i32,
    /// The bias of the exponent.
    bias: i32,
    /// The largest finite value.
    pub largest: f64,
}

pub(super) const FLOAT_E4M3: SmallFloat = small(3, 7, 448.0);
pub(super) const FLOAT_E5M2: SmallFloat = small(2, 15, 57_344.0);
pub(super) const FLOAT_E2M3: SmallFloat = small(3, 1, 7.5);
pub(super) const FLOAT_E2M1: SmallFloat = small(1, 1, 6.0);
pub(super) const F16: SmallFloat = small(10, 15, 65_504.0);
pub(super) const BF16: SmallFloat = small(7, 127, 3.389_531_389_251_535_5e38);

const fn small(mantissa: i32, bias: i32, largest: f64) -> SmallFloat {
    SmallFloat {
        mantissa,
        bias,
        largest,
    }
}

/// Rounds a number below 2^51 to the nearest whole one, ties to even. An f64 has no fractions from
/// 2^52 on. `round_ties_even` is a call on CPUs that are not known to have SSE4.1.
pub(super) fn whole(number: f64) -> f64 {
    const LARGE: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52, for both signs
    (number + LARGE) - LARGE
}

impl SmallFloat {
    /// Returns the bits of the nearest number to one that is not negative, ties to even; the
    /// largest for those above it.
    pub fn nearest(self, size: f64) -> u32 {
        let size = size.min(self.largest);
        // Below the smallest normal number steps no longer shrink.
        let exponent = exponent(size).max(1 - self.bias);
        let steps = whole(size * power(self.mantissa - exponent));
        // A normal number's steps include its hidden bit, which counts one exponent.
        (((exponent + self.bias - 1) << self.mantissa) + steps as i32) as u32
    }

    /// Returns the code of so many bits that is nearest to a number, the highest bit its sign.
    /// Equals [`nearest`](SmallFloat::nearest) of the same number in f64, without branches, so that
    /// loops over many become vector instructions.
    #[inline(always)]
    pub fn signed(self, value: f32, bits: usize) -> u8 {
        let sign = ((value.to_bits() >> 31) as u8) << (bits - 1);
        let size = value.abs().min(self.largest as f32);
        let cut = 23 - self.mantissa;
        let pattern = size.to_bits();
        // Half a step less one, and one more where the last bit that stays is odd.
        let half = (1 << (cut - 1)) - 1 + ((pattern >> cut) & 1);
        let bias = ((127 - self.bias) as u32) << self.mantissa;
        let normal = ((pattern + half) >> cut).wrapping_sub(bias);
        // Below the smallest normal number steps no longer shrink. The sum's last bit is a step.
        const LARGE: f32 = 12_582_912.0; // 1.5 * 2^23
        let step = f32::from_bits(((127 + self.mantissa + self.bias - 1) as u32) << 23);
        let subnormal = (size * step + LARGE)
            .to_bits()
            .wrapping_sub(LARGE.to_bits());
        let least = f32::from_bits(((128 - self.bias) as u32) << 23);
        let code = if size < least { subnormal } else { normal };
        code as u8 | sign
    }
}

/// Returns the E4M3 number nearest to a finite value, ties to even; values beyond 448 become it.
pub fn nearest_e4m3(value: f32) -> f32 {
    E4M3[usize::from(FLOAT_E4M3.signed(value, 8))]
}

/// Returns the exponent of a normal number: the floor of its logarithm to base 2.
pub(super) fn exponent(size: f64) -> i32 {
    ((size.to_bits() >> 52) & 0x7ff) as i32 - 1023
}

/// Returns 2^exponent, which must be normal.
fn power(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// The values behind the codes of IQ4_NL and IQ4_XS.
pub(crate) const NONLINEAR: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes the number from its bit fields by a float's definition, in f64.
    fn defined(sign: u8, exponent: i32, mantissa: u8, bits: i32, bias: i32) -> f64 {
        let fraction = f64::from(mantissa) / 2f64.powi(bits);
        let size = match exponent {
            0 => fraction * 2f64.powi(1 - bias),
            _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
        };
        if sign == 1 { -size } else { size }
    }

    #[test]
    fn every_code_of_e4m3() {
        for code in 0..=255u8 {
            let found = E4M3[usize::from(code)];
            if code & 0x7f == 0x7f {
                assert!(found.is_nan(), "{code:#x}");
                continue;
            }
            let wanted = defined(code >> 7, i32::from((code >> 3) & 15), code & 7, 3, 7);
            assert_eq!(f64::from(found).to_bits(), wanted.to_bits(), "{code:#x}");
        }
        assert_eq!(E4M3.iter().fold(0f32, |most, v| most.max(*v)), 448.0);
    }

    #[test]
    fn every_code_of_e5m2() {
        for code in 0..=255u8 {
            let found = E5M2[usize::from(code)];
            match code & 0x7f {
                0x7c => assert_eq!(found.abs(), f32::INFINITY),
                0x7d.. => assert!(found.is_nan(), "{code:#x}"),
                _ => {
                    let wanted = defined(code >> 7, i32::from((code >> 2) & 31), code & 3, 2, 15);
                    assert_eq!(f64::from(found).to_bits(), wanted.to_bits(), "{code:#x}");
                }
            }
        }
    }

    #[test]
    fn every_code_of_e2m3() {
        for code in 0..64u8 {
            let wanted = defined(code >> 5, i32::from((code >> 3) & 3), code & 7, 3, 1);
            let found = f64::from(E2M3[usize::from(code)]);
            assert_eq!(found.to_bits(), wanted.to_bits(), "{code:#x}");
        }
    }

    #[test]
    fn every_code_of_e2m1() {
        for code in 0..16u8 {
            let wanted = defined(code >> 3, i32::from((code >> 1) & 3), code & 1, 1, 1);
            let found = f64::from(E2M1[usize::from(code)]);
            assert_eq!(found.to_bits(), wanted.to_bits(), "{code:#x}");
        }
    }

    /// The codes of f32 numbers are those of f64's, at every boundary and at random.
    #[test]
    fn numbers_of_f32_have_the_codes_of_f64() {
        let floats = [
            (FLOAT_E4M3, 8),
            (FLOAT_E5M2, 8),
            (FLOAT_E2M3, 6),
            (FLOAT_E2M1, 4),
        ];
        let mut rng = crate::testing::SampleRng::new(1);
        for (float, bits) in floats {
            let check = |pattern: u32| {
                let value = f32::from_bits(pattern);
                if value.is_nan() {
                    return;
                }
                let sign = u8::from(value.is_sign_negative()) << (bits - 1);
                let wanted = float.nearest(f64::from(value.abs())) as u8 | sign;
                assert_eq!(float.signed(value, bits), wanted, "{value:e}");
            };
            // Middles between codes have the bits after those of a code, and one step to each side.
            for high in 0..=0xffff {
                for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                    check(high << 16 | low);
                }
            }
            (0..100_000).for_each(|_| check(rng.bits() as u32));
        }
    }

    #[test]
    fn every_code_of_e8m0() {
        for code in 0..255u8 {
            let wanted = 2f64.powi(i32::from(code) - 127);
            assert_eq!(f64::from(e8m0(code)), wanted, "{code}");
        }
        assert!(e8m0(255).is_nan());
    }

    #[test]
    fn scales_of_16_bits_widen_exactly() {
        for (bits, wanted) in [
            (0x0001, 5.960_464_5e-8),
            (0x0400, 6.103_515_6e-5),
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65504.0),
        ] {
            assert_eq!(f16(bits), wanted);
        }
        assert!(f16(0x7e00).is_nan() && f16(0xfc00) == f32::NEG_INFINITY);
        assert_eq!(f16(0x8000).to_bits(), (-0f32).to_bits());
        assert_eq!((bf16(0x3f80), bf16(0xc040)), (1.0, -3.0));
    }
}
