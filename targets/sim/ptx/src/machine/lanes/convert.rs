//! Conversions of numbers.

use super::half::{narrow_exact, widen};
use super::map1;
use crate::code::op::{Convert, Half, Number, PtxOp, Rounding};
use crate::machine::warp::{Doubles, Warp};
use moesaic_hardware::float::{
    bf16_from_f32, bf16_from_f32_rz, f16_from_f32, f32_from_f16, tf32_from_f32_rn,
    tf32_from_f32_rna, tf32_from_f32_rz,
};

#[inline(always)]
pub fn execute(warp: &mut Warp, op: &PtxOp, mask: u32) -> bool {
    match *op {
        PtxOp::Convert(ref convert) => one(warp, convert, mask),
        PtxOp::ConvertPair {
            half,
            rounding,
            relu,
            d,
            high,
            low,
        } => {
            let f = |v: u32| pair_part(half, rounding, relu, f32::from_bits(v));
            let (high, low) = (map1(warp.word(high), f), map1(warp.word(low), f));
            let value = std::array::from_fn(|l| high[l] << 16 | low[l]);
            warp.put(d, &value, mask);
        }
        _ => return false,
    }
    true
}

fn pair_part(half: Half, rounding: Rounding, relu: bool, value: f32) -> u32 {
    let value = if relu && value < 0.0 { 0.0 } else { value };
    u32::from(match (half, rounding) {
        (Half::Bf16, Rounding::Zero) => bf16_from_f32_rz(value),
        (Half::Bf16, _) => bf16_from_f32(value),
        (Half::F16, Rounding::Zero) => f16_towards_zero(value),
        (Half::F16, _) => f16_from_f32(value),
    })
}

/// Rounds towards zero: takes the nearest value and steps it back if it is too
/// far out.
fn f16_towards_zero(value: f32) -> u16 {
    let nearest = f16_from_f32(value);
    if f32_from_f16(nearest).abs() > value.abs() {
        nearest - 1
    } else {
        nearest
    }
}

#[inline(always)]
fn one(warp: &mut Warp, convert: &Convert, mask: u32) {
    let plain = !convert.saturate && !convert.relu && !convert.wide_a;
    match (convert.to, convert.from) {
        (Number::S64 | Number::U64, Number::S32) if plain => {
            let f = |v: u32| i64::from(v.cast_signed()).cast_unsigned();
            let value = map1(warp.word(convert.a), f);
            warp.put_double(convert.d, &value, mask);
        }
        (Number::S64 | Number::U64, Number::U32) if plain => {
            let value = map1(warp.word(convert.a), u64::from);
            warp.put_double(convert.d, &value, mask);
        }
        (Number::S32 | Number::U32, Number::U64 | Number::S64) if !convert.saturate => {
            let value = map1(warp.double(convert.a), |v: u64| v as u32);
            warp.put(convert.d, &value, mask);
        }
        (Number::F32, Number::F16) if plain => {
            let value = map1(warp.word(convert.a), |v: u32| {
                super::float::bits(f32_from_f16(v as u16))
            });
            warp.put(convert.d, &value, mask);
        }
        // A NaN keeps its very bits here, which f64 in between would make
        // quiet.
        (Number::Tf32, Number::F32) if plain => {
            let f = |v: u32| tf32(convert.rounding, f32::from_bits(v));
            let value = map1(warp.word(convert.a), f);
            warp.put(convert.d, &value, mask);
        }
        (Number::Bf16, Number::F32) if plain && convert.rounding == Rounding::Nearest => {
            let f = |v: u32| u32::from(bf16_from_f32(f32::from_bits(v)));
            let value = map1(warp.word(convert.a), f);
            warp.put(convert.d, &value, mask);
        }
        _ => general(warp, convert, mask),
    }
}

#[inline(never)]
fn general(warp: &mut Warp, convert: &Convert, mask: u32) {
    let bits: Doubles = if convert.wide_a {
        *warp.double(convert.a)
    } else {
        map1(warp.word(convert.a), u64::from)
    };
    let value = map1(&bits, |v| scalar(convert, v));
    if convert.wide_d {
        warp.put_double(convert.d, &value, mask)
    } else {
        warp.put(convert.d, &map1(&value, |v: u64| v as u32), mask)
    }
}

/// A number halfway through a conversion.
#[derive(Clone, Copy)]
enum Middle {
    Integer(i128),
    Float(f64),
}

fn scalar(convert: &Convert, bits: u64) -> u64 {
    let middle = read(convert.from, bits);
    match (middle, convert.to.is_float()) {
        (Middle::Integer(value), false) => integer(convert, value),
        (Middle::Float(value), false) => integer_from_float(convert, value),
        (Middle::Integer(value), true) => float_from_integer(convert, value),
        (Middle::Float(value), true) => float(convert, value),
    }
}

fn read(from: Number, bits: u64) -> Middle {
    let word = bits as u32;
    match from {
        Number::U8 => Middle::Integer(i128::from(bits as u8)),
        Number::U16 => Middle::Integer(i128::from(bits as u16)),
        Number::U32 => Middle::Integer(i128::from(word)),
        Number::U64 => Middle::Integer(i128::from(bits)),
        Number::S8 => Middle::Integer(i128::from(bits as i8)),
        Number::S16 => Middle::Integer(i128::from(bits as i16)),
        Number::S32 => Middle::Integer(i128::from(word.cast_signed())),
        Number::S64 => Middle::Integer(i128::from(bits.cast_signed())),
        Number::F16 => Middle::Float(f64::from(f32_from_f16(bits as u16))),
        Number::Bf16 => Middle::Float(f64::from(widen(Half::Bf16, bits as u16))),
        Number::F32 | Number::Tf32 => Middle::Float(f64::from(f32::from_bits(word))),
        Number::F64 => Middle::Float(f64::from_bits(bits)),
    }
}

/// Returns the least and the largest value of an integer type.
fn range(to: Number) -> (i128, i128) {
    let bits = to.bits();
    if to.is_signed() {
        (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1)
    } else {
        (0, (1i128 << bits) - 1)
    }
}

/// Truncates to the type, then extends to the register by the type's sign.
fn integer(convert: &Convert, value: i128) -> u64 {
    let to = convert.to;
    let (least, largest) = range(to);
    let value = if convert.saturate {
        value.clamp(least, largest)
    } else {
        value
    };
    let truncated = value as u64 & largest_bits(to);
    let negative = to.is_signed() && truncated >> (to.bits() - 1) & 1 == 1;
    let extended = if negative {
        truncated | !largest_bits(to)
    } else {
        truncated
    };
    match (convert.wide_d, to.bits()) {
        (true, _) | (_, 64) => extended,
        // 16-bit registers hold their own bits alone.
        (false, 16) => extended & 0xffff,
        (false, _) => extended & 0xffff_ffff,
    }
}

fn largest_bits(to: Number) -> u64 {
    u64::MAX >> (64 - to.bits())
}

fn rounded(rounding: Rounding, value: f64) -> f64 {
    match rounding {
        Rounding::Nearest => value.round_ties_even(),
        Rounding::NearestAway => value.round(),
        Rounding::Zero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
    }
}

/// Converts a float to an integer: values out of range go to the nearer end. A
/// NaN becomes zero, except for 64-bit results and sources of 64 bits, where it
/// becomes the top bit alone.
fn integer_from_float(convert: &Convert, value: f64) -> u64 {
    let (least, largest) = range(convert.to);
    // PTX ISA, "cvt": the result for NaN is documented for each width.
    if value.is_nan() {
        let wide = convert.to.bits() == 64 || convert.from == Number::F64;
        let top = 1u64 << (convert.to.bits() - 1);
        return if wide && convert.to.bits() >= 32 {
            top
        } else {
            0
        };
    }
    let value = if convert.flush && value.abs() < f64::from(f32::MIN_POSITIVE) {
        0.0
    } else {
        value
    };
    let whole = rounded(convert.rounding, value) as i128;
    let saturated = Convert {
        saturate: false,
        ..*convert
    };
    integer(&saturated, whole.clamp(least, largest))
}

fn float_from_integer(convert: &Convert, value: i128) -> u64 {
    match convert.to {
        Number::F64 => directed64(convert.rounding, value).to_bits(),
        Number::F32 => u64::from(directed32(convert.rounding, value).to_bits()),
        to => {
            let half = if to == Number::Bf16 {
                Half::Bf16
            } else {
                Half::F16
            };
            // 64-bit integers beyond 2^53 are far past f16, and for bf16
            // rounding to odd keeps the lost bits.
            let nearest = value as f64;
            let odd = if nearest as i128 == value || nearest.to_bits() & 1 == 1 {
                nearest
            } else if (nearest as i128).unsigned_abs() > value.unsigned_abs() {
                f64::from_bits(nearest.to_bits() - 1)
            } else {
                f64::from_bits(nearest.to_bits() | 1)
            };
            u64::from(narrow_exact(half, odd))
        }
    }
}

fn directed32(rounding: Rounding, value: i128) -> f32 {
    let nearest = value as f32;
    match (rounding, (nearest as i128).cmp(&value)) {
        (Rounding::Zero, order) if order.is_gt() && value > 0 => nearest.next_down(),
        (Rounding::Zero, order) if order.is_lt() && value < 0 => nearest.next_up(),
        (Rounding::Down, order) if order.is_gt() => nearest.next_down(),
        (Rounding::Up, order) if order.is_lt() => nearest.next_up(),
        _ => nearest,
    }
}

fn directed64(rounding: Rounding, value: i128) -> f64 {
    let nearest = value as f64;
    match (rounding, (nearest as i128).cmp(&value)) {
        (Rounding::Zero, order) if order.is_gt() && value > 0 => nearest.next_down(),
        (Rounding::Zero, order) if order.is_lt() && value < 0 => nearest.next_up(),
        (Rounding::Down, order) if order.is_gt() => nearest.next_down(),
        (Rounding::Up, order) if order.is_lt() => nearest.next_up(),
        _ => nearest,
    }
}

fn float(convert: &Convert, value: f64) -> u64 {
    let value = if convert.integral {
        rounded(convert.rounding, value)
    } else {
        value
    };
    let value = if convert.saturate && value.is_nan() {
        0.0
    } else if convert.saturate {
        value.clamp(0.0, 1.0)
    } else if convert.relu && value < 0.0 {
        0.0
    } else {
        value
    };
    let tiny = convert.flush && value.abs() < f64::from(f32::MIN_POSITIVE);
    let value = if tiny { 0.0f64.copysign(value) } else { value };
    match convert.to {
        Number::F64 => value.to_bits(),
        Number::F32 => u64::from(super::float::bits(single(convert.rounding, value))),
        Number::Tf32 => u64::from(tf32(convert.rounding, value as f32)),
        Number::Bf16 if convert.rounding == Rounding::Zero => {
            u64::from(bf16_from_f32_rz(value as f32))
        }
        Number::F16 if convert.rounding == Rounding::Zero => {
            u64::from(f16_towards_zero(value as f32))
        }
        Number::Bf16 => u64::from(narrow_exact(Half::Bf16, value)),
        _ => u64::from(narrow_exact(Half::F16, value)),
    }
}

fn tf32(rounding: Rounding, value: f32) -> u32 {
    match rounding {
        Rounding::NearestAway => tf32_from_f32_rna(value),
        Rounding::Zero => tf32_from_f32_rz(value),
        _ => tf32_from_f32_rn(value),
    }
}

fn single(rounding: Rounding, value: f64) -> f32 {
    let nearest = value as f32;
    let wide = f64::from(nearest);
    match rounding {
        Rounding::Zero if wide.abs() > value.abs() => f32::from_bits(nearest.to_bits() - 1),
        Rounding::Down if wide > value => nearest.next_down(),
        Rounding::Up if wide < value => nearest.next_up(),
        _ => nearest,
    }
}
