//! Arithmetic: the same operation on the 32 lanes of a warp.
//!
//! The loops are plain, and the compiler vectorises them. The whole family is
//! compiled twice, for any processor and for one with 256-bit vectors and fused
//! multiply-add; the machine picks one at its start.

pub mod atomic;
mod compare;
mod convert;
mod float;
mod half;
mod integer;
mod long;
mod moves;
pub mod scalar;

use super::warp::Warp;
use crate::code::op::PtxOp;

/// Runs an arithmetic instruction for the lanes of `mask`; returns false for
/// any other instruction.
pub type Execute = fn(&mut Warp, &PtxOp, u32) -> bool;

/// Returns the fastest version for this processor.
pub fn pick() -> Execute {
    #[cfg(target_arch = "x86_64")]
    {
        let wide = std::arch::is_x86_feature_detected!("avx2")
            && std::arch::is_x86_feature_detected!("fma")
            && std::arch::is_x86_feature_detected!("bmi2")
            && std::arch::is_x86_feature_detected!("lzcnt")
            && std::arch::is_x86_feature_detected!("popcnt");
        if wide {
            return with_vectors;
        }
    }
    plain
}

#[cfg(target_arch = "x86_64")]
fn with_vectors(warp: &mut Warp, op: &PtxOp, mask: u32) -> bool {
    #[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
    fn run(warp: &mut Warp, op: &PtxOp, mask: u32) -> bool {
        execute(warp, op, mask)
    }
    // SAFETY: `pick` returns this function only when the features are there.
    unsafe { run(warp, op, mask) }
}

fn plain(warp: &mut Warp, op: &PtxOp, mask: u32) -> bool {
    execute(warp, op, mask)
}

#[inline(always)]
fn execute(warp: &mut Warp, op: &PtxOp, mask: u32) -> bool {
    match op {
        PtxOp::Int2 { .. }
        | PtxOp::Int1 { .. }
        | PtxOp::Int3 { .. }
        | PtxOp::Short2 { .. }
        | PtxOp::Short1 { .. }
        | PtxOp::ShortMulAdd { .. }
        | PtxOp::Insert { .. }
        | PtxOp::Logic3 { .. } => integer::execute(warp, op, mask),
        PtxOp::Float2 { .. }
        | PtxOp::Float1 { .. }
        | PtxOp::FusedMulAdd { .. }
        | PtxOp::FloatTest { .. }
        | PtxOp::Real2 { .. }
        | PtxOp::Real1 { .. }
        | PtxOp::RealFusedMulAdd { .. } => float::execute(warp, op, mask),
        PtxOp::Half2 { .. } | PtxOp::Half1 { .. } | PtxOp::HalfFusedMulAdd { .. } => {
            half::execute(warp, op, mask)
        }
        PtxOp::Long2 { .. }
        | PtxOp::LongShift { .. }
        | PtxOp::Long1 { .. }
        | PtxOp::LongCount { .. }
        | PtxOp::LongMulAdd { .. }
        | PtxOp::LongInsert { .. }
        | PtxOp::LongField { .. }
        | PtxOp::MulWide { .. }
        | PtxOp::MulWideAdd { .. }
        | PtxOp::Carry { .. } => long::execute(warp, op, mask),
        PtxOp::Compare(_)
        | PtxOp::CompareSet { .. }
        | PtxOp::HalfComparePacked { .. }
        | PtxOp::Select { .. }
        | PtxOp::LongSelect { .. }
        | PtxOp::SelectSign { .. }
        | PtxOp::Predicate2 { .. }
        | PtxOp::PredicateMove { .. } => compare::execute(warp, op, mask),
        PtxOp::Convert(_) | PtxOp::ConvertPair { .. } => convert::execute(warp, op, mask),
        _ => moves::execute(warp, op, mask),
    }
}

/// Maps a function over one row.
#[inline(always)]
fn map1<A: Copy, D: Copy + Default>(a: &[A; 32], f: impl Fn(A) -> D) -> [D; 32] {
    let mut out = [D::default(); 32];
    for lane in 0..32 {
        out[lane] = f(a[lane]);
    }
    out
}

/// Maps a function over two rows.
#[inline(always)]
fn map2<A: Copy, B: Copy, D: Copy + Default>(
    a: &[A; 32],
    b: &[B; 32],
    f: impl Fn(A, B) -> D,
) -> [D; 32] {
    let mut out = [D::default(); 32];
    for lane in 0..32 {
        out[lane] = f(a[lane], b[lane]);
    }
    out
}

/// Maps a function over three rows.
#[inline(always)]
fn map3<A: Copy, B: Copy, C: Copy, D: Copy + Default>(
    a: &[A; 32],
    b: &[B; 32],
    c: &[C; 32],
    f: impl Fn(A, B, C) -> D,
) -> [D; 32] {
    let mut out = [D::default(); 32];
    for lane in 0..32 {
        out[lane] = f(a[lane], b[lane], c[lane]);
    }
    out
}

/// Returns the lanes for which a predicate of two rows holds.
#[inline(always)]
fn ask2<A: Copy, B: Copy>(a: &[A; 32], b: &[B; 32], f: impl Fn(A, B) -> bool) -> u32 {
    let mut yes = [0u32; 32];
    for lane in 0..32 {
        yes[lane] = u32::from(f(a[lane], b[lane])) << lane;
    }
    yes.iter().fold(0, |mask, bit| mask | bit)
}

/// Extends the sign of loaded bits if the access asks for it.
#[inline(always)]
pub fn scalar_sign(
    access: &crate::code::op::MemoryAccess,
    value: &super::warp::Doubles,
) -> Option<super::warp::Doubles> {
    if !access.signed || access.bytes == 8 {
        return None;
    }
    let shift = 64 - 8 * u32::from(access.bytes);
    let extend = |v: u64| ((v << shift).cast_signed() >> shift).cast_unsigned();
    Some(map1(value, extend))
}

/// Computes an integer operation on two single values.
pub fn reduce2(op: crate::code::op::Int2, a: u32, b: u32) -> u32 {
    integer::int2(op, &[a; 32], &[b; 32])[0]
}
