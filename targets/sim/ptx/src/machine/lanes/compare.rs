//! Comparisons, selections, predicates.

use super::half::widen;
use super::{ask2, map1, map2};
use crate::code::op::{Compare, CompareOp, Half, Logic, NONE, Number, PtxOp, RowIndex};
use crate::machine::warp::{Warp, Words};

#[inline(always)]
pub fn execute(warp: &mut Warp, op: &PtxOp, mask: u32) -> bool {
    match *op {
        PtxOp::Compare(ref compare) => {
            let yes = holds(warp, compare);
            let (with, logic) = (with(warp, compare), compare.logic);
            let (yes, no) = match with {
                Some(with) => (logic.apply(yes, with), logic.apply(!yes, with)),
                None => (yes, !yes),
            };
            warp.put_predicate(compare.result, yes, mask);
            warp.put_predicate(compare.inverse, no, mask);
        }
        PtxOp::Select { d, a, b, p, negate } => {
            let pick = warp.predicate(p, negate);
            let mut value = [0; 32];
            for (lane, value) in value.iter_mut().enumerate() {
                let take = 0u32.wrapping_sub(pick >> lane & 1);
                *value = (warp.word(a)[lane] & take) | (warp.word(b)[lane] & !take);
            }
            warp.put(d, &value, mask);
        }
        PtxOp::LongSelect { d, a, b, p, negate } => {
            let pick = warp.predicate(p, negate);
            let (a, b) = (warp.double(a), warp.double(b));
            let value = std::array::from_fn(|l| if pick >> l & 1 == 1 { a[l] } else { b[l] });
            warp.put_double(d, &value, mask);
        }
        _ => rest(warp, op, mask),
    }
    true
}

#[inline(always)]
fn rest(warp: &mut Warp, op: &PtxOp, mask: u32) {
    match *op {
        PtxOp::Predicate2 {
            op,
            d,
            a,
            b,
            negate: [not_a, not_b],
        } => {
            let value = op.apply(warp.predicate(a, not_a), warp.predicate(b, not_b));
            warp.put_predicate(d, value, mask);
        }
        PtxOp::PredicateMove { d, a, negate } => {
            let value = warp.predicate(a, negate);
            warp.put_predicate(d, value, mask);
        }
        PtxOp::CompareSet {
            ref compare,
            d,
            float,
        } => {
            let yes = holds(warp, compare);
            let yes = with(warp, compare).map_or(yes, |with| compare.logic.apply(yes, with));
            let one = if float { 1f32.to_bits() } else { u32::MAX };
            let value = std::array::from_fn(|l| if yes >> l & 1 == 1 { one } else { 0 });
            warp.put(d, &value, mask);
        }
        PtxOp::SelectSign { float, d, a, b, c } => {
            let take = |c: u32| {
                if float {
                    f32::from_bits(c) >= 0.0
                } else {
                    c.cast_signed() >= 0
                }
            };
            let pick = map1(warp.word(c), take);
            let (a, b) = (warp.word(a), warp.word(b));
            let value = std::array::from_fn(|l| if pick[l] { a[l] } else { b[l] });
            warp.put(d, &value, mask);
        }
        PtxOp::HalfComparePacked {
            half,
            comparison,
            p,
            q,
            a,
            b,
        } => packed(warp, (half, comparison), (p, q), (a, b), mask),
        _ => {}
    }
}

fn packed(
    warp: &mut Warp,
    (half, comparison): (Half, CompareOp),
    (p, q): (RowIndex, RowIndex),
    (a, b): (RowIndex, RowIndex),
    mask: u32,
) {
    for (row, shift) in [(p, 0), (q, 16)] {
        let part = |v: u32| widen(half, (v >> shift) as u16);
        let yes = ask2(warp.word(a), warp.word(b), |a, b| {
            floats(comparison, part(a), part(b))
        });
        warp.put_predicate(row, yes, mask);
    }
}

fn with(warp: &Warp, compare: &Compare) -> Option<u32> {
    (compare.with != NONE).then(|| warp.predicate(compare.with, compare.negate_with))
}

impl Logic {
    #[inline(always)]
    fn apply(self, a: u32, b: u32) -> u32 {
        match self {
            Logic::And => a & b,
            Logic::Or => a | b,
            Logic::Xor => a ^ b,
        }
    }
}

/// Returns the lanes for which the comparison itself is true.
#[inline(always)]
fn holds(warp: &Warp, compare: &Compare) -> u32 {
    let (a, b) = (compare.a, compare.b);
    match compare.ty {
        Number::U32 => ordered(compare.comparison, warp.word(a), warp.word(b)),
        Number::S32 => {
            let (a, b) = (warp.word(a), warp.word(b));
            ordered(
                compare.comparison,
                &map1(a, u32::cast_signed),
                &map1(b, u32::cast_signed),
            )
        }
        Number::F32 => singles(compare.comparison, warp.word(a), warp.word(b)),
        _ => rare(warp, compare),
    }
}

#[inline(never)]
fn rare(warp: &Warp, compare: &Compare) -> u32 {
    let (a, b, comparison) = (compare.a, compare.b, compare.comparison);
    let short = |row: &Words| map1(row, |v: u32| v as u16);
    match compare.ty {
        Number::U64 => ordered(comparison, warp.double(a), warp.double(b)),
        Number::S64 => {
            let (a, b) = (warp.double(a), warp.double(b));
            ordered(
                comparison,
                &map1(a, u64::cast_signed),
                &map1(b, u64::cast_signed),
            )
        }
        Number::U16 | Number::U8 => ordered(comparison, &short(warp.word(a)), &short(warp.word(b))),
        Number::S16 | Number::S8 => {
            let signed = |row: &Words| map1(row, |v: u32| v as u16 as i16);
            ordered(comparison, &signed(warp.word(a)), &signed(warp.word(b)))
        }
        Number::F64 => ask2(warp.double(a), warp.double(b), |a, b| {
            floats(comparison, f64::from_bits(a), f64::from_bits(b))
        }),
        ty => {
            let half = if ty == Number::Bf16 {
                Half::Bf16
            } else {
                Half::F16
            };
            ask2(warp.word(a), warp.word(b), |a, b| {
                floats(comparison, widen(half, a as u16), widen(half, b as u16))
            })
        }
    }
}

#[inline(always)]
fn ordered<T: Copy + PartialOrd>(comparison: CompareOp, a: &[T; 32], b: &[T; 32]) -> u32 {
    match comparison {
        CompareOp::Eq | CompareOp::EqOrNan => ask2(a, b, |a, b| a == b),
        CompareOp::Ne | CompareOp::NeOrNan => ask2(a, b, |a, b| a != b),
        CompareOp::Lt | CompareOp::LtOrNan => ask2(a, b, |a, b| a < b),
        CompareOp::Le | CompareOp::LeOrNan => ask2(a, b, |a, b| a <= b),
        CompareOp::Gt | CompareOp::GtOrNan => ask2(a, b, |a, b| a > b),
        CompareOp::Ge | CompareOp::GeOrNan => ask2(a, b, |a, b| a >= b),
        CompareOp::Number => u32::MAX,
        CompareOp::Nan => 0,
    }
}

#[inline(always)]
fn singles(comparison: CompareOp, a: &Words, b: &Words) -> u32 {
    let with = |f: fn(f32, f32) -> bool| {
        let yes = map2(a, b, |a, b| {
            u32::from(f(f32::from_bits(a), f32::from_bits(b)))
        });
        yes.iter()
            .enumerate()
            .fold(0, |mask, (lane, bit)| mask | bit << lane)
    };
    match comparison {
        CompareOp::Lt => with(|a, b| a < b),
        CompareOp::Gt => with(|a, b| a > b),
        CompareOp::Le => with(|a, b| a <= b),
        CompareOp::Ge => with(|a, b| a >= b),
        _ => ask2(a, b, |a, b| {
            floats(comparison, f32::from_bits(a), f32::from_bits(b))
        }),
    }
}

#[inline(always)]
fn floats<T: Copy + PartialOrd>(comparison: CompareOp, a: T, b: T) -> bool {
    let order = a.partial_cmp(&b);
    let nan = order.is_none();
    match comparison {
        CompareOp::Eq => a == b,
        CompareOp::Ne => !nan && a != b,
        CompareOp::Lt => a < b,
        CompareOp::Le => a <= b,
        CompareOp::Gt => a > b,
        CompareOp::Ge => a >= b,
        CompareOp::EqOrNan => nan || a == b,
        CompareOp::NeOrNan => nan || a != b,
        CompareOp::LtOrNan => nan || a < b,
        CompareOp::LeOrNan => nan || a <= b,
        CompareOp::GtOrNan => nan || a > b,
        CompareOp::GeOrNan => nan || a >= b,
        CompareOp::Number => !nan,
        CompareOp::Nan => nan,
    }
}
