//! What codes of 8 and of 4 bits stand for.

/// FP8 E4M3 (OCP, `e4m3fn`): four bits of exponent with bias 7, three of mantissa, no
/// infinities; all ones is NaN.
pub(crate) static E4M3: [f32; 256] = {
    let mut values = [0f32; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = e4m3(code as u32);
        code += 1;
    }
    values
};

/// FP4 E2M1 (OCP): the sign is the highest of four bits.
pub(crate) static E2M1: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

const fn e4m3(code: u32) -> f32 {
    let (sign, exponent, mantissa) = (code >> 7, (code >> 3) & 15, code & 7);
    let size = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        // Steps of 2^-9 below the smallest normal number, 2^-6.
        (0, _) => mantissa as f32 / 512.0,
        _ => f32::from_bits(((exponent + 120) << 23) | (mantissa << 20)),
    };
    if sign == 1 { -size } else { size }
}

/// E8M0 (OCP): 2^(code - 127); 255 is NaN.
pub(crate) fn e8m0(code: u8) -> f32 {
    match code {
        // Not a normal number of an f32.
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(code) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number that fields of bits are: a float's definition, in f64.
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
    fn every_code_of_e2m1() {
        for code in 0..16u8 {
            let wanted = defined(code >> 3, i32::from((code >> 1) & 3), code & 1, 1, 1);
            let found = f64::from(E2M1[usize::from(code)]);
            assert_eq!(found.to_bits(), wanted.to_bits(), "{code:#x}");
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
}
