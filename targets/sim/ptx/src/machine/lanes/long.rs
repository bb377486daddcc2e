//! Arithmetic on 64-bit integers.

use super::{integer, map1, map2, map3, scalar};
use crate::code::op::{Int1, Int2, PtxOp};
use crate::machine::warp::{Doubles, Warp, Words};

#[inline(always)]
pub fn execute(warp: &mut Warp, op: &PtxOp, mask: u32) -> bool {
    match *op {
        PtxOp::Long2 { op, d, a, b } => {
            let value = long2(op, warp.double(a), warp.double(b));
            warp.put_double(d, &value, mask);
        }
        PtxOp::LongShift { op, d, a, b } => {
            let value = shift(op, warp.double(a), warp.word(b));
            warp.put_double(d, &value, mask);
        }
        PtxOp::MulWide { signed, d, a, b } => {
            let value = product(signed, warp.word(a), warp.word(b));
            warp.put_double(d, &value, mask);
        }
        PtxOp::MulWideAdd { signed, d, a, b, c } => {
            let value = product(signed, warp.word(a), warp.word(b));
            let value = map2(&value, warp.double(c), u64::wrapping_add);
            warp.put_double(d, &value, mask);
        }
        PtxOp::LongMulAdd { d, a, b, c } => {
            let f = |a: u64, b: u64, c: u64| a.wrapping_mul(b).wrapping_add(c);
            let value = map3(warp.double(a), warp.double(b), warp.double(c), f);
            warp.put_double(d, &value, mask);
        }
        _ => rare(warp, op, mask),
    }
    true
}

#[inline(never)]
fn rare(warp: &mut Warp, op: &PtxOp, mask: u32) {
    match *op {
        PtxOp::Long1 { op, d, a } => {
            let value = long1(op, warp.double(a));
            warp.put_double(d, &value, mask);
        }
        PtxOp::LongCount { op, d, a } => {
            let value = count(op, warp.double(a));
            warp.put(d, &value, mask);
        }
        PtxOp::LongInsert {
            d,
            a,
            b,
            position,
            length,
        } => {
            let (p, n) = (warp.word(position), warp.word(length));
            let (x, y) = (warp.double(a), warp.double(b));
            let value = std::array::from_fn(|l| integer::insert(x[l], y[l], p[l], n[l], 64));
            warp.put_double(d, &value, mask);
        }
        PtxOp::LongField {
            signed,
            d,
            a,
            position,
            length,
        } => {
            let (p, n, x) = (warp.word(position), warp.word(length), warp.double(a));
            let value = std::array::from_fn(|l| scalar::long_field(x[l], p[l], n[l], signed, 64));
            warp.put_double(d, &value, mask);
        }
        _ => carry(warp, op, mask),
    }
}

fn carry(warp: &mut Warp, op: &PtxOp, mask: u32) {
    let &PtxOp::Carry {
        subtract,
        wide,
        take,
        give,
        d,
        a,
        b,
    } = op
    else {
        return;
    };
    let (mut value, mut out) = ([0u64; 32], 0);
    for (lane, value) in value.iter_mut().enumerate() {
        let (x, y, bits) = if wide {
            (warp.double(a)[lane], warp.double(b)[lane], 64)
        } else {
            (
                u64::from(warp.word(a)[lane]),
                u64::from(warp.word(b)[lane]),
                32,
            )
        };
        let carry = u128::from(take && warp.carry >> lane & 1 == 1);
        let sum = if subtract {
            u128::from(x)
                .wrapping_sub(u128::from(y))
                .wrapping_sub(carry)
        } else {
            u128::from(x) + u128::from(y) + carry
        };
        out |= ((sum >> bits & 1) as u32) << lane;
        *value = sum as u64;
    }
    if give {
        warp.carry = (warp.carry & !mask) | (out & mask);
    }
    if wide {
        warp.put_double(d, &value, mask)
    } else {
        warp.put(d, &map1(&value, |v: u64| v as u32), mask)
    }
}

#[inline(always)]
fn product(signed: bool, a: &Words, b: &Words) -> Doubles {
    if signed {
        map2(a, b, |a: u32, b: u32| {
            (i64::from(a.cast_signed()) * i64::from(b.cast_signed())).cast_unsigned()
        })
    } else {
        map2(a, b, |a: u32, b: u32| u64::from(a) * u64::from(b))
    }
}

#[inline(always)]
fn shift(op: Int2, a: &Doubles, b: &Words) -> Doubles {
    match op {
        Int2::ShiftLeft => map2(a, b, |a: u64, b: u32| if b < 64 { a << b } else { 0 }),
        Int2::ShiftRightSigned => map2(a, b, |a: u64, b: u32| {
            (a.cast_signed() >> b.min(63)).cast_unsigned()
        }),
        _ => map2(a, b, |a: u64, b: u32| if b < 64 { a >> b } else { 0 }),
    }
}

#[inline(always)]
fn signed(f: impl Fn(i64, i64) -> i64) -> impl Fn(u64, u64) -> u64 {
    move |a, b| f(a.cast_signed(), b.cast_signed()).cast_unsigned()
}

#[inline(always)]
fn long2(op: Int2, a: &Doubles, b: &Doubles) -> Doubles {
    match op {
        Int2::Add => map2(a, b, u64::wrapping_add),
        Int2::Sub => map2(a, b, u64::wrapping_sub),
        Int2::Mul => map2(a, b, u64::wrapping_mul),
        Int2::And => map2(a, b, |a: u64, b: u64| a & b),
        Int2::Or => map2(a, b, |a: u64, b: u64| a | b),
        Int2::Xor => map2(a, b, |a: u64, b: u64| a ^ b),
        _ => rare2(op, a, b),
    }
}

#[inline(never)]
fn rare2(op: Int2, a: &Doubles, b: &Doubles) -> Doubles {
    match op {
        Int2::MinSigned => map2(a, b, signed(i64::min)),
        Int2::MaxSigned => map2(a, b, signed(i64::max)),
        Int2::MinUnsigned => map2(a, b, u64::min),
        Int2::MaxUnsigned => map2(a, b, u64::max),
        Int2::MulHighUnsigned => map2(a, b, |a: u64, b: u64| {
            ((u128::from(a) * u128::from(b)) >> 64) as u64
        }),
        Int2::MulHighSigned => map2(a, b, |a: u64, b: u64| {
            ((i128::from(a.cast_signed()) * i128::from(b.cast_signed())) >> 64) as u64
        }),
        Int2::DivUnsigned => map2(a, b, |a: u64, b: u64| a.checked_div(b).unwrap_or(u64::MAX)),
        Int2::DivSigned => map2(
            a,
            b,
            signed(|a, b| if b == 0 { -1 } else { a.wrapping_div(b) }),
        ),
        Int2::RemUnsigned => map2(a, b, |a: u64, b: u64| a.checked_rem(b).unwrap_or(a)),
        Int2::RemSigned => map2(
            a,
            b,
            signed(|a, b| if b == 0 { a } else { a.wrapping_rem(b) }),
        ),
        _ => *a,
    }
}

fn long1(op: Int1, a: &Doubles) -> Doubles {
    match op {
        Int1::Negate => map1(a, u64::wrapping_neg),
        Int1::Absolute => map1(a, |v: u64| v.cast_signed().wrapping_abs().cast_unsigned()),
        Int1::Not => map1(a, |v: u64| !v),
        Int1::Reverse => map1(a, u64::reverse_bits),
        _ => map1(a, |v: u64| u64::from(v == 0)),
    }
}

fn count(op: Int1, a: &Doubles) -> Words {
    let magnitude = |v: u64| v ^ (v.cast_signed() >> 63).cast_unsigned();
    let top = |v: u64| 63u32.wrapping_sub(v.leading_zeros());
    let shift = |v: u64| if v == 0 { u32::MAX } else { v.leading_zeros() };
    match op {
        Int1::Population => map1(a, u64::count_ones),
        Int1::FindUnsigned => map1(a, top),
        Int1::FindSigned => map1(a, |v| top(magnitude(v))),
        Int1::FindShiftUnsigned => map1(a, shift),
        Int1::FindShiftSigned => map1(a, |v| shift(magnitude(v))),
        _ => map1(a, u64::leading_zeros),
    }
}
