//! Arithmetic in f32 and f64.
//!
//! A NaN that arithmetic makes is the one of NVIDIA hardware, all ones below
//! the sign. Approximate instructions are computed in f64 and rounded, which
//! satisfies every error bound that PTX states.

use super::{map1, map2, map3};
use crate::code::op::{Float1, Float2, FloatMode, FloatTest, PtxOp};
use crate::machine::warp::{Doubles, Warp, Words};

/// The NaN that f32 arithmetic returns.
const NAN: u32 = 0x7fff_ffff;
/// The NaN that f64 arithmetic returns.
const REAL_NAN: u64 = 0xfff8_0000_0000_0000;

const PLAIN: FloatMode = FloatMode {
    flush: false,
    saturate: false,
    relu: false,
};

#[inline(always)]
pub fn execute(warp: &mut Warp, op: &PtxOp, mask: u32) -> bool {
    match *op {
        PtxOp::FusedMulAdd { mode, d, a, b, c } => {
            let value = fused(mode, warp.word(a), warp.word(b), warp.word(c));
            warp.put(d, &value, mask);
        }
        PtxOp::Float2 { op, mode, d, a, b } => {
            let value = if mode == PLAIN {
                float2(op, warp.word(a), warp.word(b))
            } else {
                modal2(op, mode, warp.word(a), warp.word(b))
            };
            warp.put(d, &value, mask);
        }
        PtxOp::Float1 { op, mode, d, a } => {
            let value = float1(op, mode, warp.word(a));
            warp.put(d, &value, mask);
        }
        _ => reals(warp, op, mask),
    }
    true
}

/// Returns the result of an atomic on f64: the sum, or the operand.
pub fn real(add: bool, a: f64, b: f64) -> u64 {
    real_bits(if add { a + b } else { b })
}

#[inline(never)]
fn reals(warp: &mut Warp, op: &PtxOp, mask: u32) {
    match *op {
        PtxOp::Real2 { op, d, a, b } => {
            let value = real2(op, warp.double(a), warp.double(b));
            warp.put_double(d, &value, mask);
        }
        PtxOp::Real1 { op, d, a } => {
            let value = real1(op, warp.double(a));
            warp.put_double(d, &value, mask);
        }
        PtxOp::RealFusedMulAdd { d, a, b, c } => {
            let f = |a: u64, b: u64, c: u64| {
                real_bits(f64::from_bits(a).mul_add(f64::from_bits(b), f64::from_bits(c)))
            };
            let value = map3(warp.double(a), warp.double(b), warp.double(c), f);
            warp.put_double(d, &value, mask);
        }
        PtxOp::FloatTest { test, wide, d, a } => {
            let mut yes = 0;
            for lane in 0..32 {
                let holds = if wide {
                    tests64(test, f64::from_bits(warp.double(a)[lane]))
                } else {
                    tests32(test, f32::from_bits(warp.word(a)[lane]))
                };
                yes |= u32::from(holds) << lane;
            }
            warp.put_predicate(d, yes, mask);
        }
        _ => {}
    }
}

fn tests32(test: FloatTest, value: f32) -> bool {
    match test {
        FloatTest::Finite => value.is_finite(),
        FloatTest::Infinite => value.is_infinite(),
        FloatTest::Number => !value.is_nan(),
        FloatTest::NotNumber => value.is_nan(),
        FloatTest::Normal => value.is_normal(),
        FloatTest::Subnormal => value.is_subnormal(),
    }
}

fn tests64(test: FloatTest, value: f64) -> bool {
    match test {
        FloatTest::Finite => value.is_finite(),
        FloatTest::Infinite => value.is_infinite(),
        FloatTest::Number => !value.is_nan(),
        FloatTest::NotNumber => value.is_nan(),
        FloatTest::Normal => value.is_normal(),
        FloatTest::Subnormal => value.is_subnormal(),
    }
}

/// Returns the bits of a result.
#[inline(always)]
pub fn bits(value: f32) -> u32 {
    if value.is_nan() { NAN } else { value.to_bits() }
}

fn real_bits(value: f64) -> u64 {
    if value.is_nan() {
        REAL_NAN
    } else {
        value.to_bits()
    }
}

/// Flushes subnormals to zero of the same sign.
#[inline(always)]
fn flushed(value: u32) -> u32 {
    match value & 0x7f80_0000 {
        0 => value & 0x8000_0000,
        _ => value,
    }
}

/// Applies a mode to a result.
#[inline(always)]
pub fn finish(mode: FloatMode, value: u32) -> u32 {
    let value = if mode.flush { flushed(value) } else { value };
    let number = f32::from_bits(value);
    if mode.saturate {
        // PTX ISA, ".sat": NaN becomes +0.
        return if number >= 0.0 {
            number.min(1.0).to_bits() & 0x7fff_ffff
        } else {
            0
        };
    }
    if mode.relu && number < 0.0 { 0 } else { value }
}

#[inline(always)]
fn fused(mode: FloatMode, a: &Words, b: &Words, c: &Words) -> Words {
    let f = |a: u32, b: u32, c: u32| {
        bits(f32::from_bits(a).mul_add(f32::from_bits(b), f32::from_bits(c)))
    };
    if mode == PLAIN {
        return map3(a, b, c, f);
    }
    let take = |v: u32| if mode.flush { flushed(v) } else { v };
    map3(a, b, c, |a, b, c| {
        finish(mode, f(take(a), take(b), take(c)))
    })
}

#[inline(never)]
fn modal2(op: Float2, mode: FloatMode, a: &Words, b: &Words) -> Words {
    let value = if mode.flush {
        float2(op, &map1(a, flushed), &map1(b, flushed))
    } else {
        float2(op, a, b)
    };
    map1(&value, |v| finish(mode, v))
}

#[inline(always)]
fn with2(a: &Words, b: &Words, f: impl Fn(f32, f32) -> f32) -> Words {
    map2(a, b, |a, b| bits(f(f32::from_bits(a), f32::from_bits(b))))
}

#[inline(always)]
pub fn float2(op: Float2, a: &Words, b: &Words) -> Words {
    match op {
        Float2::Add => with2(a, b, |a, b| a + b),
        Float2::Sub => with2(a, b, |a, b| a - b),
        Float2::Mul => with2(a, b, |a, b| a * b),
        Float2::Div => with2(a, b, |a, b| a / b),
        Float2::Min => map2(a, b, |a, b| smaller(a, b, false)),
        Float2::Max => map2(a, b, |a, b| larger(a, b, false)),
        Float2::MinNan => map2(a, b, |a, b| smaller(a, b, true)),
        Float2::MaxNan => map2(a, b, |a, b| larger(a, b, true)),
        Float2::CopySign => map2(a, b, |a: u32, b: u32| (b & 0x7fff_ffff) | (a & 0x8000_0000)),
    }
}

/// Returns the smaller number; -0 is smaller than +0. A NaN loses, or wins if
/// `nan`.
#[inline(always)]
fn smaller(a: u32, b: u32, nan: bool) -> u32 {
    let (x, y) = (f32::from_bits(a), f32::from_bits(b));
    match (x.is_nan(), y.is_nan()) {
        (false, false) if x == y => a | b,
        (false, false) => bits(if x < y { x } else { y }),
        (true, true) => NAN,
        _ if nan => NAN,
        (true, false) => b,
        (false, true) => a,
    }
}

#[inline(always)]
fn larger(a: u32, b: u32, nan: bool) -> u32 {
    let (x, y) = (f32::from_bits(a), f32::from_bits(b));
    match (x.is_nan(), y.is_nan()) {
        (false, false) if x == y => a & b,
        (false, false) => bits(if x > y { x } else { y }),
        (true, true) => NAN,
        _ if nan => NAN,
        (true, false) => b,
        (false, true) => a,
    }
}

#[inline(always)]
fn float1(op: Float1, mode: FloatMode, a: &Words) -> Words {
    match op {
        Float1::Negate if mode == PLAIN => map1(a, |v: u32| v ^ 0x8000_0000),
        Float1::Absolute if mode == PLAIN => map1(a, |v: u32| v & 0x7fff_ffff),
        _ => rare1(op, mode, a),
    }
}

#[inline(never)]
fn rare1(op: Float1, mode: FloatMode, a: &Words) -> Words {
    let take = |v: u32| if mode.flush { flushed(v) } else { v };
    map1(a, |v| finish(mode, single(op, take(v))))
}

/// Computes an operation of one number.
pub fn single(op: Float1, value: u32) -> u32 {
    let x = f32::from_bits(value);
    let wide = f64::from(x);
    match op {
        Float1::Negate => value ^ 0x8000_0000,
        Float1::Absolute => value & 0x7fff_ffff,
        Float1::Reciprocal => bits(1.0 / x),
        Float1::SquareRoot => bits(x.sqrt()),
        Float1::ReciprocalRoot => bits((1.0 / wide.sqrt()) as f32),
        Float1::Exp2 => bits(wide.exp2() as f32),
        Float1::Log2 => bits(wide.log2() as f32),
        Float1::Sine => bits(wide.sin() as f32),
        Float1::Cosine => bits(wide.cos() as f32),
        Float1::Tanh => bits(wide.tanh() as f32),
    }
}

fn real2(op: Float2, a: &Doubles, b: &Doubles) -> Doubles {
    map2(a, b, |a: u64, b: u64| {
        let (x, y) = (f64::from_bits(a), f64::from_bits(b));
        match op {
            Float2::Add => real_bits(x + y),
            Float2::Sub => real_bits(x - y),
            Float2::Mul => real_bits(x * y),
            Float2::Div => real_bits(x / y),
            Float2::Min | Float2::MinNan => real_bits(if x == y {
                f64::from_bits(a | b)
            } else {
                x.min(y)
            }),
            Float2::Max | Float2::MaxNan => real_bits(if x == y {
                f64::from_bits(a & b)
            } else {
                x.max(y)
            }),
            Float2::CopySign => y.copysign(x).to_bits(),
        }
    })
}

fn real1(op: Float1, a: &Doubles) -> Doubles {
    map1(a, |a: u64| {
        let x = f64::from_bits(a);
        match op {
            Float1::Negate => (-x).to_bits(),
            Float1::Absolute => x.abs().to_bits(),
            Float1::Reciprocal => real_bits(1.0 / x),
            Float1::SquareRoot => real_bits(x.sqrt()),
            Float1::ReciprocalRoot => real_bits(1.0 / x.sqrt()),
            _ => real_bits(x),
        }
    })
}
