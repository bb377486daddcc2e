//! The arithmetic of atomics.

use super::half::{narrow_exact, widen};
use crate::code::op::{AtomicKind, AtomicType, Half, Number};

/// Returns the new value of memory.
pub fn combine(kind: AtomicKind, ty: AtomicType, old: u64, operand: u64, swap: u64) -> u64 {
    match ty {
        AtomicType::Number(ty) => number(kind, ty, old, operand, swap),
        AtomicType::Pair(ty) => {
            let part = |shift: u32| {
                let value = number(
                    kind,
                    ty,
                    old >> shift & 0xffff,
                    operand >> shift & 0xffff,
                    swap,
                );
                value << shift
            };
            part(0) | part(16)
        }
    }
}

fn number(kind: AtomicKind, ty: Number, old: u64, operand: u64, swap: u64) -> u64 {
    match (kind, ty) {
        (AtomicKind::Exchange, _) => operand,
        (AtomicKind::CompareSwap, ty) => {
            let mask = u64::MAX >> (64 - ty.bits());
            if (old ^ operand) & mask == 0 {
                swap
            } else {
                old
            }
        }
        (_, Number::F32) => u64::from(float(kind, old as u32, operand as u32)),
        (_, Number::F64) => super::float::real(
            kind == AtomicKind::Add,
            f64::from_bits(old),
            f64::from_bits(operand),
        ),
        (_, Number::F16) => u64::from(half(Half::F16, kind, old as u16, operand as u16)),
        (_, Number::Bf16) => u64::from(half(Half::Bf16, kind, old as u16, operand as u16)),
        _ => integer(kind, ty, old, operand),
    }
}

fn float(kind: AtomicKind, old: u32, operand: u32) -> u32 {
    let (a, b) = (f32::from_bits(old), f32::from_bits(operand));
    super::float::bits(match kind {
        AtomicKind::Min => a.min(b),
        AtomicKind::Max => a.max(b),
        _ => a + b,
    })
}

fn half(half: Half, kind: AtomicKind, old: u16, operand: u16) -> u16 {
    let (a, b) = (f64::from(widen(half, old)), f64::from(widen(half, operand)));
    narrow_exact(
        half,
        match kind {
            AtomicKind::Min => a.min(b),
            AtomicKind::Max => a.max(b),
            _ => a + b,
        },
    )
}

fn integer(kind: AtomicKind, ty: Number, old: u64, operand: u64) -> u64 {
    let shift = 64 - ty.bits();
    let signed = |v: u64| (v << shift).cast_signed() >> shift;
    let unsigned = |v: u64| v << shift >> shift;
    let (a, b) = (unsigned(old), unsigned(operand));
    match kind {
        AtomicKind::Min if ty.is_signed() => signed(old).min(signed(operand)).cast_unsigned(),
        AtomicKind::Max if ty.is_signed() => signed(old).max(signed(operand)).cast_unsigned(),
        AtomicKind::Min => a.min(b),
        AtomicKind::Max => a.max(b),
        AtomicKind::And => a & b,
        AtomicKind::Or => a | b,
        AtomicKind::Xor => a ^ b,
        AtomicKind::Increment => {
            if a >= b {
                0
            } else {
                a + 1
            }
        }
        AtomicKind::Decrement => {
            if a == 0 || a > b {
                b
            } else {
                a - 1
            }
        }
        _ => unsigned(a.wrapping_add(b)),
    }
}
