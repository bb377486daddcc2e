use super::*;
use crate::testing::Random;

/// The value, in f64, of a float with the given exponent and mantissa bits.
fn plain(bits: u32, exponent_bits: u32, mantissa_bits: u32) -> f64 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let mantissa = f64::from(bits & ((1 << mantissa_bits) - 1));
    let exponent = (bits >> mantissa_bits & ((1 << exponent_bits) - 1)) as i32;
    let sign = 1.0 - 2.0 * f64::from(bits >> (mantissa_bits + exponent_bits) & 1);
    let fraction = mantissa / f64::from(1 << mantissa_bits);
    sign * match exponent {
        0 => fraction * 2f64.powi(1 - bias),
        e if e == (1 << exponent_bits) - 1 && mantissa == 0.0 => f64::INFINITY,
        e if e == (1 << exponent_bits) - 1 => f64::NAN,
        e => (1.0 + fraction) * 2f64.powi(e - bias),
    }
}

fn same(a: f64, b: f64) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

#[test]
fn every_narrow_value_decodes() {
    for bits in 0..=u16::MAX {
        let wide = u32::from(bits);
        assert!(
            same(f32_from_bf16(bits).into(), plain(wide, 8, 7)),
            "{bits:x}"
        );
        assert!(
            same(f32_from_f16(bits).into(), plain(wide, 5, 10)),
            "{bits:x}"
        );
    }
    for bits in 0..=u8::MAX {
        let wide = u32::from(bits);
        assert!(
            same(f32_from_e5m2(bits).into(), plain(wide, 5, 2)),
            "{bits:x}"
        );
        let expected = match bits & 0x7f {
            0x7f => f64::NAN,
            // The exponent of all ones is an ordinary one.
            0x78.. => plain(wide & !0x40, 4, 3) * 256.0,
            _ => plain(wide, 4, 3),
        };
        assert!(same(f32_from_e4m3(bits).into(), expected), "{bits:x}");
    }
}

#[test]
fn every_narrow_value_survives_the_way_through_f32() {
    for bits in 0..=u16::MAX {
        let (half, brain) = (f32_from_f16(bits), f32_from_bf16(bits));
        let expect = |nan: bool| if nan { NAN16 } else { bits };
        assert_eq!(f16_from_f32(half), expect(half.is_nan()));
        assert_eq!(bf16_from_f32(brain), expect(brain.is_nan()));
        assert_eq!(bf16_from_f32_rz(brain), expect(brain.is_nan()));
    }
}

/// Finds the nearest of the non-negative finite values `decode(0..=largest)` by
/// search; ties go to even bits. Half a step beyond the largest is infinity.
fn nearest(value: f64, infinity: u16, decode: impl Fn(u16) -> f64) -> u16 {
    let (mut low, mut high) = (0, infinity - 1);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if decode(middle) <= value {
            low = middle
        } else {
            high = middle - 1
        }
    }
    // The value infinity would have if the exponent went on.
    let next = if low + 1 == infinity {
        2.0 * decode(low) - decode(low - 1)
    } else {
        decode(low + 1)
    };
    match (value - decode(low)).total_cmp(&(next - value)) {
        std::cmp::Ordering::Less => low,
        std::cmp::Ordering::Equal => low + low % 2,
        std::cmp::Ordering::Greater => low + 1,
    }
}

/// Random bits, and values at, just below and just above every tie of f16.
fn patterns() -> Vec<f32> {
    let mut random = Random::new(1);
    let mut list: Vec<f32> = (0..100_000)
        .map(|_| f32::from_bits(random.next()))
        .collect();
    for bits in 0..0x7bffu16 {
        let tie = (f32_from_f16(bits) + f32_from_f16(bits + 1)) / 2.0;
        list.extend([tie, tie.next_down(), -tie.next_up()]);
    }
    for high in (0..0x7f80u32).step_by(7) {
        let tie = high << 16 | 0x8000;
        list.extend([tie - 1, tie, tie + 1].map(f32::from_bits));
    }
    list.extend([65519.996, 65520.0, f32::MAX, f32::MIN_POSITIVE, 1e-45]);
    list.retain(|value| value.is_finite());
    list
}

#[test]
fn narrowing_rounds_to_nearest_even() {
    for value in patterns() {
        let sign = (value.to_bits() >> 16 & 0x8000) as u16;
        let magnitude = f64::from(value.abs());
        let half = nearest(magnitude, 0x7c00, |b| f32_from_f16(b).into());
        assert_eq!(f16_from_f32(value), sign | half, "{value:e}");
        let brain = nearest(magnitude, 0x7f80, |b| f32_from_bf16(b).into());
        assert_eq!(bf16_from_f32(value), sign | brain, "{value:e}");
        assert_eq!(bf16_from_f32_rz(value), (value.to_bits() >> 16) as u16);
    }
}

#[test]
fn the_special_values() {
    for nan in [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001)] {
        assert_eq!((f16_from_f32(nan), bf16_from_f32(nan)), (NAN16, NAN16));
        // ptxas 13.0 does the same for sm_80, sm_90a and sm_100a: it adds
        // 0x1000 unless |value| is infinite or NaN, then clears the low 13
        // bits.
        assert_eq!(tf32_from_f32_rna(nan), nan.to_bits() & 0xffff_e000);
        assert_eq!(tf32_from_f32_rn(nan), NAN32);
    }
    assert_eq!(f16_from_f32(f32::NEG_INFINITY), 0xfc00);
    assert_eq!(bf16_from_f32(f32::INFINITY), 0x7f80);
    assert_eq!(bf16_from_f32(f32::MAX), 0x7f80);
    assert_eq!(bf16_from_f32_rz(f32::MAX), 0x7f7f);
    let infinity = f32::INFINITY.to_bits();
    assert_eq!(tf32_from_f32_rna(f32::INFINITY), infinity);
    assert_eq!(tf32_from_f32_rna(f32::from_bits(0x7f80_0001)), infinity);
    assert_eq!(tf32_from_f32_rn(f32::MAX), infinity);
    assert_eq!(tf32_from_f32_rz(f32::MAX), 0x7f7f_e000);
}

#[test]
fn tf32_keeps_ten_bits() {
    for value in patterns() {
        let (bits, step) = (value.to_bits(), 0x2000);
        let (low, rest) = (bits & !0x1fff, bits & 0x1fff);
        let up = low + step;
        let away = if rest >= 0x1000 { up } else { low };
        let even = match rest.cmp(&0x1000) {
            std::cmp::Ordering::Equal => low + (low & step),
            std::cmp::Ordering::Less => low,
            std::cmp::Ordering::Greater => up,
        };
        assert_eq!(tf32_from_f32_rna(value), away);
        assert_eq!(tf32_from_f32_rn(value), even);
        assert_eq!(tf32_from_f32_rz(value), low);
        assert_eq!(f32_from_tf32(bits).to_bits(), low);
    }
}
