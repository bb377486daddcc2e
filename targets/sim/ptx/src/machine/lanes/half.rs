//! Arithmetic in f16 and bf16, one or two elements per register.
//!
//! Sums and products of two halves are exact in f64, so one rounding gives the
//! result of the hardware.

use super::float::{finish, single};
use crate::code::op::{Float1, Float2, Half, HalfForm, PtxOp};
use crate::machine::warp::Warp;
use moesaic_hardware::float::{bf16_from_f32, f16_from_f32, f32_from_bf16, f32_from_f16};

#[inline(never)]
pub fn execute(warp: &mut Warp, op: &PtxOp, mask: u32) -> bool {
    match *op {
        PtxOp::Half2 { op, form, d, a, b } => {
            let (x, y) = (warp.word(a), warp.word(b));
            let value = std::array::from_fn(|lane| {
                each(form, |part| half2(op, form, part(x[lane]), part(y[lane])))
            });
            warp.put(d, &value, mask);
        }
        PtxOp::Half1 { op, form, d, a } => {
            let x = warp.word(a);
            let value =
                std::array::from_fn(|lane| each(form, |part| half1(op, form, part(x[lane]))));
            warp.put(d, &value, mask);
        }
        PtxOp::HalfFusedMulAdd { form, d, a, b, c } => {
            let (x, y, z) = (warp.word(a), warp.word(b), warp.word(c));
            let value = std::array::from_fn(|lane| {
                each(form, |part| {
                    fused(form, part(x[lane]), part(y[lane]), part(z[lane]))
                })
            });
            warp.put(d, &value, mask);
        }
        _ => return false,
    }
    true
}

/// Runs `f` for each element of a register; `f` receives a function that
/// extracts its element from an operand.
fn each(form: HalfForm, f: impl Fn(&dyn Fn(u32) -> u16) -> u16) -> u32 {
    let low = u32::from(f(&|v| v as u16));
    if form.packed {
        low | u32::from(f(&|v| (v >> 16) as u16)) << 16
    } else {
        low
    }
}

/// Returns the value of a half.
pub fn widen(half: Half, bits: u16) -> f32 {
    match half {
        Half::F16 => f32_from_f16(bits),
        Half::Bf16 => f32_from_bf16(bits),
    }
}

/// Rounds to nearest, ties to even.
pub fn narrow(half: Half, value: f32) -> u16 {
    match half {
        Half::F16 => f16_from_f32(value),
        Half::Bf16 => bf16_from_f32(value),
    }
}

/// Rounds an f64 once: first to f32 towards odd, so that the second rounding
/// sees if anything was lost.
pub fn narrow_exact(half: Half, value: f64) -> u16 {
    let nearest = value as f32;
    if value.is_nan() || f64::from(nearest) == value || !nearest.is_finite() {
        return narrow(half, nearest);
    }
    // Rounding twice to nearest can round a tie up that was none. An odd last
    // bit in between marks every inexact value as no tie.
    let bits = nearest.to_bits();
    let past = f64::from(nearest).abs() > value.abs();
    let truncated = if past { bits - 1 } else { bits };
    narrow(half, f32::from_bits(truncated | 1))
}

fn half2(op: Float2, form: HalfForm, a: u16, b: u16) -> u16 {
    let (x, y) = (widen(form.half, a), widen(form.half, b));
    let (wide_x, wide_y) = (f64::from(x), f64::from(y));
    match op {
        Float2::Add => close(form, wide_x + wide_y),
        Float2::Sub => close(form, wide_x - wide_y),
        Float2::Mul => close(form, wide_x * wide_y),
        Float2::Div => close(form, wide_x / wide_y),
        Float2::CopySign => (b & 0x7fff) | (a & 0x8000),
        _ => {
            let rows = super::float::float2(op, &[x.to_bits(); 32], &[y.to_bits(); 32]);
            close(form, f64::from(f32::from_bits(rows[0])))
        }
    }
}

fn fused(form: HalfForm, a: u16, b: u16, c: u16) -> u16 {
    let [x, y, z] = [a, b, c].map(|v| f64::from(widen(form.half, v)));
    // The product is exact. Its sum with a third number may not be, so the sum
    // is rounded to odd before the final rounding.
    let product = x * y;
    let sum = product + z;
    let error = {
        let virtual_z = sum - product;
        (product - (sum - virtual_z)) + (z - virtual_z)
    };
    let odd = if !sum.is_finite() || error == 0.0 || sum.to_bits() & 1 == 1 {
        sum
    } else if (error > 0.0) == (sum > 0.0) {
        f64::from_bits(sum.to_bits() | 1)
    } else {
        f64::from_bits(sum.to_bits() - 1)
    };
    close(form, odd)
}

fn close(form: HalfForm, value: f64) -> u16 {
    let bits = narrow_exact(form.half, value);
    if !form.mode.saturate && !form.mode.relu && !form.mode.flush {
        return bits;
    }
    let bits = if form.mode.flush && form.half == Half::F16 && bits & 0x7c00 == 0 {
        bits & 0x8000
    } else {
        bits
    };
    let mode = crate::code::op::FloatMode {
        flush: false,
        ..form.mode
    };
    narrow(
        form.half,
        f32::from_bits(finish(mode, widen(form.half, bits).to_bits())),
    )
}

fn half1(op: Float1, form: HalfForm, a: u16) -> u16 {
    match op {
        Float1::Negate => a ^ 0x8000,
        Float1::Absolute => a & 0x7fff,
        _ => {
            let value = single(op, widen(form.half, a).to_bits());
            close(form, f64::from(f32::from_bits(value)))
        }
    }
}
