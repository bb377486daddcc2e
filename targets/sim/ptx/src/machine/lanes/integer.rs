//! Arithmetic on 32-bit integers, and on 16-bit ones in 32-bit rows.

use super::{map1, map2, map3};
use crate::code::op::{Int1, Int2, Int3, PtxOp, RowIndex};
use crate::machine::warp::{Warp, Words};

#[inline(always)]
pub fn execute(warp: &mut Warp, op: &PtxOp, mask: u32) -> bool {
    match *op {
        PtxOp::Int2 { op, d, a, b } => {
            let value = int2(op, warp.word(a), warp.word(b));
            warp.put(d, &value, mask);
        }
        PtxOp::Int1 { op, d, a } => {
            let value = int1(op, warp.word(a));
            warp.put(d, &value, mask);
        }
        PtxOp::Int3 { op, d, a, b, c } => {
            let value = int3(op, warp.word(a), warp.word(b), warp.word(c));
            warp.put(d, &value, mask);
        }
        PtxOp::Logic3 { d, a, b, c, table } => {
            let f = |a, b, c| logic3(table, a, b, c);
            let value = map3(warp.word(a), warp.word(b), warp.word(c), f);
            warp.put(d, &value, mask);
        }
        PtxOp::Insert {
            d,
            a,
            b,
            position,
            length,
        } => {
            let value = inserts(warp, [a, b, position, length]);
            warp.put(d, &value, mask);
        }
        _ => short(warp, op, mask),
    }
    true
}

#[inline(always)]
fn short(warp: &mut Warp, op: &PtxOp, mask: u32) {
    match *op {
        PtxOp::Short2 {
            op,
            signed,
            d,
            a,
            b,
        } => {
            // Shift amounts are 32 bits whatever the type.
            let shift = matches!(
                op,
                Int2::ShiftLeft | Int2::ShiftRightSigned | Int2::ShiftRightUnsigned
            );
            let x = extend(warp.word(a), signed);
            let y = if shift {
                *warp.word(b)
            } else {
                extend(warp.word(b), signed)
            };
            let value = map1(&int2(op, &x, &y), |v| v & 0xffff);
            warp.put(d, &value, mask);
        }
        PtxOp::Short1 { op, signed, d, a } => {
            let value = map1(&int1(op, &extend(warp.word(a), signed)), |v| v & 0xffff);
            warp.put(d, &value, mask);
        }
        PtxOp::ShortMulAdd { d, a, b, c } => {
            let f = |a: u32, b: u32, c: u32| a.wrapping_mul(b).wrapping_add(c) & 0xffff;
            let value = map3(warp.word(a), warp.word(b), warp.word(c), f);
            warp.put(d, &value, mask);
        }
        _ => {}
    }
}

#[inline(always)]
fn extend(row: &Words, signed: bool) -> Words {
    if signed {
        map1(row, |v| i32::from(v as u16 as i16).cast_unsigned())
    } else {
        map1(row, |v| v & 0xffff)
    }
}

#[inline(never)]
fn inserts(warp: &Warp, rows: [RowIndex; 4]) -> Words {
    let [a, b, position, length] = rows.map(|row| warp.word(row));
    std::array::from_fn(|l| insert(a[l].into(), b[l].into(), position[l], length[l], 32) as u32)
}

/// Inserts the low `length` bits of `a` at `position` of `b`, in `bits` bits.
#[inline(always)]
pub fn insert(a: u64, b: u64, position: u32, length: u32, bits: u32) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    if position >= bits || length == 0 {
        return b;
    }
    let field = if length >= 64 {
        u64::MAX
    } else {
        (1u64 << length) - 1
    };
    let field = field << position;
    (b & !field) | ((a << position) & field)
}

#[inline(always)]
fn logic3(table: u8, a: u32, b: u32, c: u32) -> u32 {
    let term = |bit: u32| 0u32.wrapping_sub(u32::from(table) >> bit & 1);
    (term(0) & !a & !b & !c)
        | (term(1) & !a & !b & c)
        | (term(2) & !a & b & !c)
        | (term(3) & !a & b & c)
        | (term(4) & a & !b & !c)
        | (term(5) & a & !b & c)
        | (term(6) & a & b & !c)
        | (term(7) & a & b & c)
}

#[inline(always)]
fn signed(f: impl Fn(i32, i32) -> i32) -> impl Fn(u32, u32) -> u32 {
    move |a, b| f(a.cast_signed(), b.cast_signed()).cast_unsigned()
}

#[inline(always)]
pub fn int2(op: Int2, a: &Words, b: &Words) -> Words {
    match op {
        Int2::Add => map2(a, b, u32::wrapping_add),
        Int2::Sub => map2(a, b, u32::wrapping_sub),
        Int2::Mul => map2(a, b, u32::wrapping_mul),
        Int2::And => map2(a, b, |a: u32, b: u32| a & b),
        Int2::Or => map2(a, b, |a: u32, b: u32| a | b),
        Int2::Xor => map2(a, b, |a: u32, b: u32| a ^ b),
        Int2::MinSigned => map2(a, b, signed(i32::min)),
        Int2::MaxSigned => map2(a, b, signed(i32::max)),
        Int2::MinUnsigned => map2(a, b, u32::min),
        Int2::MaxUnsigned => map2(a, b, u32::max),
        Int2::ShiftLeft => map2(a, b, |a: u32, b: u32| if b < 32 { a << b } else { 0 }),
        Int2::ShiftRightUnsigned => map2(a, b, |a: u32, b: u32| if b < 32 { a >> b } else { 0 }),
        Int2::ShiftRightSigned => map2(a, b, |a: u32, b: u32| {
            (a.cast_signed() >> b.min(31)).cast_unsigned()
        }),
        _ => rare2(op, a, b),
    }
}

#[inline(never)]
fn rare2(op: Int2, a: &Words, b: &Words) -> Words {
    let wide = |a: u32, b: u32| i64::from(a.cast_signed()) * i64::from(b.cast_signed());
    let short = |v: u32| (v << 8).cast_signed() >> 8;
    match op {
        Int2::MulHighSigned => map2(a, b, |a, b| (wide(a, b) >> 32) as u32),
        Int2::MulHighUnsigned => map2(a, b, |a: u32, b: u32| {
            ((u64::from(a) * u64::from(b)) >> 32) as u32
        }),
        Int2::Mul24Signed => map2(a, b, |a, b| short(a).wrapping_mul(short(b)).cast_unsigned()),
        Int2::Mul24Unsigned => map2(a, b, |a: u32, b: u32| {
            (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff)
        }),
        Int2::Mul16Signed => map2(a, b, |a: u32, b: u32| {
            (i32::from(a as u16 as i16) * i32::from(b as u16 as i16)).cast_unsigned()
        }),
        Int2::Mul16Unsigned => map2(a, b, |a: u32, b: u32| (a & 0xffff) * (b & 0xffff)),
        // PTX leaves division by zero open; NVIDIA hardware returns all ones.
        Int2::DivUnsigned => map2(a, b, |a: u32, b: u32| a.checked_div(b).unwrap_or(u32::MAX)),
        Int2::DivSigned => map2(
            a,
            b,
            signed(|a, b| if b == 0 { -1 } else { a.wrapping_div(b) }),
        ),
        Int2::RemUnsigned => map2(a, b, |a: u32, b: u32| a.checked_rem(b).unwrap_or(a)),
        Int2::RemSigned => map2(
            a,
            b,
            signed(|a, b| if b == 0 { a } else { a.wrapping_rem(b) }),
        ),
        Int2::AddSaturated => map2(a, b, signed(i32::saturating_add)),
        Int2::SubSaturated => map2(a, b, signed(i32::saturating_sub)),
        Int2::FieldMask => map2(a, b, |a: u32, b: u32| {
            insert(u64::MAX, 0, a, b.min(32), 32) as u32
        }),
        _ => *a,
    }
}

#[inline(always)]
fn int1(op: Int1, a: &Words) -> Words {
    match op {
        Int1::Negate => map1(a, u32::wrapping_neg),
        Int1::Absolute => map1(a, |v: u32| v.cast_signed().wrapping_abs().cast_unsigned()),
        Int1::Not => map1(a, |v: u32| !v),
        Int1::LogicalNot => map1(a, |v: u32| u32::from(v == 0)),
        Int1::Population => map1(a, u32::count_ones),
        Int1::LeadingZeros => map1(a, u32::leading_zeros),
        Int1::Reverse => map1(a, u32::reverse_bits),
        Int1::FindUnsigned => map1(a, |v: u32| 31u32.wrapping_sub(v.leading_zeros())),
        Int1::FindSigned => map1(a, |v: u32| 31u32.wrapping_sub(magnitude(v).leading_zeros())),
        Int1::FindShiftUnsigned => map1(a, shift_to_top),
        Int1::FindShiftSigned => map1(a, |v: u32| shift_to_top(magnitude(v))),
    }
}

/// Returns the bits that differ from the sign.
#[inline(always)]
fn magnitude(value: u32) -> u32 {
    value ^ (value.cast_signed() >> 31).cast_unsigned()
}

#[inline(always)]
fn shift_to_top(value: u32) -> u32 {
    match value {
        0 => u32::MAX,
        value => value.leading_zeros(),
    }
}

#[inline(always)]
fn int3(op: Int3, a: &Words, b: &Words, c: &Words) -> Words {
    match op {
        Int3::MulAdd => map3(a, b, c, |a: u32, b: u32, c: u32| {
            a.wrapping_mul(b).wrapping_add(c)
        }),
        Int3::Permute => map3(a, b, c, super::scalar::permute),
        _ => rare3(op, a, b, c),
    }
}

#[inline(never)]
fn rare3(op: Int3, a: &Words, b: &Words, c: &Words) -> Words {
    let then_add = |first: Int2| map2(&rare2(first, a, b), c, u32::wrapping_add);
    match op {
        Int3::MulAddHighSigned => then_add(Int2::MulHighSigned),
        Int3::MulAddHighUnsigned => then_add(Int2::MulHighUnsigned),
        Int3::MulAdd24Signed => then_add(Int2::Mul24Signed),
        Int3::MulAdd24Unsigned => then_add(Int2::Mul24Unsigned),
        Int3::SadSigned => map3(a, b, c, |a: u32, b: u32, c: u32| {
            c.wrapping_add(a.cast_signed().abs_diff(b.cast_signed()))
        }),
        Int3::SadUnsigned => map3(a, b, c, |a: u32, b, c: u32| c.wrapping_add(a.abs_diff(b))),
        Int3::FieldSigned => map3(a, b, c, |a, b, c| super::scalar::field(a, b, c, true)),
        Int3::FieldUnsigned => map3(a, b, c, |a, b, c| super::scalar::field(a, b, c, false)),
        _ => map3(a, b, c, |a, b, c| super::scalar::rare3(op, a, b, c)),
    }
}
