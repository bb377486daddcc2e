//! Bit operations on one lane that the host has no instruction for.

use crate::code::op::Int3;

/// Computes `prmt` without a mode: each nibble of `c` picks a byte of `b:a`,
/// or, with its top bit set, the byte's sign in every bit.
#[inline(always)]
pub fn permute(a: u32, b: u32, c: u32) -> u32 {
    let bytes = u64::from(b) << 32 | u64::from(a);
    let mut out = 0;
    for at in 0..4 {
        let pick = c >> (4 * at);
        let byte = (bytes >> (8 * (pick & 7))) as u8;
        let byte = match pick & 8 {
            0 => byte,
            _ => (byte.cast_signed() >> 7).cast_unsigned(),
        };
        out |= u32::from(byte) << (8 * at);
    }
    out
}

/// Computes `bfe.32`: the `length` bits from `position` on, sign-extended or
/// not.
pub fn field(a: u32, position: u32, length: u32, signed: bool) -> u32 {
    let wide = if signed {
        i64::from(a.cast_signed()).cast_unsigned()
    } else {
        u64::from(a)
    };
    long_field(wide, position, length, signed, 32) as u32
}

/// Computes `bfe` over `bits` bits; bits beyond the top repeat the sign or are
/// zero.
pub fn long_field(a: u64, position: u32, length: u32, signed: bool, bits: u32) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    if length == 0 {
        return 0;
    }
    let last = (position + length - 1).min(bits - 1);
    let sign = signed && a >> last & 1 == 1;
    let shifted = if position >= 64 { 0 } else { a >> position };
    let kept = (last + 1).saturating_sub(position);
    let mask = match kept {
        0 => 0,
        kept if kept >= 64 => u64::MAX,
        kept => (1u64 << kept) - 1,
    };
    if sign {
        (shifted & mask) | !mask
    } else {
        shifted & mask
    }
}

/// Computes funnel shifts, the modes of `prmt`, and dot products.
pub fn rare3(op: Int3, a: u32, b: u32, c: u32) -> u32 {
    let pair = u64::from(b) << 32 | u64::from(a);
    match op {
        Int3::FunnelLeftWrap => ((pair << (c & 31)) >> 32) as u32,
        Int3::FunnelLeftClamp => ((u128::from(pair) << c.min(32)) >> 32) as u32,
        Int3::FunnelRightWrap => (pair >> (c & 31)) as u32,
        Int3::FunnelRightClamp => (pair >> c.min(32)) as u32,
        Int3::DotSigned => dot(a, b, c, |v| i32::from(v.cast_signed())),
        Int3::DotUnsigned => dot(a, b, c, i32::from),
        _ => permute(a, b, selector(op, c & 3)),
    }
}

/// Returns the selector that a mode of `prmt` stands for.
fn selector(op: Int3, c: u32) -> u32 {
    let nibbles = |f: &dyn Fn(u32) -> u32| (0..4).fold(0, |all, at| all | f(at) << (4 * at));
    match op {
        Int3::PermuteForward4 => nibbles(&|at| c + at),
        Int3::PermuteBackward4 => nibbles(&|at| (c + 8 - at) & 7),
        Int3::PermuteRepeat8 => nibbles(&|_| c),
        Int3::PermuteEdgeLeft => nibbles(&|at| at.max(c)),
        Int3::PermuteEdgeRight => nibbles(&|at| at.min(c)),
        _ => nibbles(&|at| 2 * (c & 1) + at % 2),
    }
}

fn dot(a: u32, b: u32, c: u32, value: impl Fn(u8) -> i32) -> u32 {
    let pairs = a.to_le_bytes().into_iter().zip(b.to_le_bytes());
    let sum = pairs.map(|(a, b)| value(a) * value(b)).sum::<i32>();
    c.wrapping_add(sum.cast_unsigned())
}
