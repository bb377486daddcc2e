//! Moves, vectors of registers, addresses.

use super::map1;
use crate::code::layout::{LOCAL_WINDOW, PARAM_WINDOW, RANK_SHIFT, SHARED_WINDOW, WINDOW};
use crate::code::op::{PtxOp, RowIndex};
use crate::machine::warp::{Doubles, Warp};
use crate::text::StateSpace;

#[inline(always)]
pub fn execute(warp: &mut Warp, op: &PtxOp, mask: u32) -> bool {
    match *op {
        PtxOp::Nop => {}
        PtxOp::Move { d, a } => {
            let value = *warp.word(a);
            warp.put(d, &value, mask);
        }
        PtxOp::LongMove { d, a } => {
            let value = *warp.double(a);
            warp.put_double(d, &value, mask);
        }
        PtxOp::Join { d, low, high } => {
            let (low, high) = (warp.word(low), warp.word(high));
            let value = std::array::from_fn(|l| u64::from(high[l]) << 32 | u64::from(low[l]));
            warp.put_double(d, &value, mask);
        }
        PtxOp::Split { low, high, a } => {
            let value = *warp.double(a);
            warp.put(low, &map1(&value, |v: u64| v as u32), mask);
            warp.put(high, &map1(&value, |v: u64| (v >> 32) as u32), mask);
        }
        PtxOp::ShortJoin { d, low, high } => {
            let (low, high) = (warp.word(low), warp.word(high));
            let value = std::array::from_fn(|l| high[l] << 16 | (low[l] & 0xffff));
            warp.put(d, &value, mask);
        }
        PtxOp::ShortSplit { low, high, a } => {
            let value = *warp.word(a);
            warp.put(low, &map1(&value, |v: u32| v & 0xffff), mask);
            warp.put(high, &map1(&value, |v: u32| v >> 16), mask);
        }
        _ => return rare(warp, op, mask),
    }
    true
}

#[inline(never)]
fn rare(warp: &mut Warp, op: &PtxOp, mask: u32) -> bool {
    match *op {
        PtxOp::ShortJoin4 { d, parts } => {
            let rows = parts.map(|part| *warp.word(part));
            let value = std::array::from_fn(|l| {
                let each = rows.iter().enumerate();
                each.fold(0, |all, (i, row)| {
                    all | u64::from(row[l] & 0xffff) << (16 * i)
                })
            });
            warp.put_double(d, &value, mask);
        }
        PtxOp::ShortSplit4 { parts, a } => {
            let value = *warp.double(a);
            for (i, part) in parts.into_iter().enumerate() {
                warp.put(
                    part,
                    &map1(&value, |v: u64| (v >> (16 * i)) as u32 & 0xffff),
                    mask,
                );
            }
        }
        _ => return spaces(warp, op, mask),
    }
    true
}

/// Executes conversions between address spaces.
fn spaces(warp: &mut Warp, op: &PtxOp, mask: u32) -> bool {
    match *op {
        PtxOp::ToGeneric { space, wide, d, a } => {
            address(warp, wide, d, a, mask, |v| match space {
                StateSpace::Shared => v.wrapping_add(SHARED_WINDOW),
                StateSpace::Local => v.wrapping_add(LOCAL_WINDOW),
                StateSpace::Param if v < PARAM_WINDOW => v.wrapping_add(PARAM_WINDOW),
                _ => v,
            })
        }
        PtxOp::FromGeneric { space, wide, d, a } => {
            address(warp, wide, d, a, mask, |v| match space {
                StateSpace::Shared => v.wrapping_sub(SHARED_WINDOW),
                StateSpace::Local => v.wrapping_sub(LOCAL_WINDOW),
                _ => v,
            })
        }
        PtxOp::IsSpace {
            space,
            cluster,
            wide,
            d,
            a,
        } => {
            let own = u64::from(warp.block + 1);
            let value = any_width(warp, wide, a);
            let inside = |v: u64| is_in(space, v) && (cluster || is_own(own, v));
            let yes = (0..32).fold(0, |yes, l| yes | u32::from(inside(value[l])) << l);
            warp.put_predicate(d, yes, mask);
        }
        PtxOp::MapShared {
            wide, d, a, rank, ..
        } => {
            let rank = *warp.word(rank);
            let value = any_width(warp, wide, a);
            let field = 0xff << RANK_SHIFT;
            let value: Doubles = std::array::from_fn(|l| {
                (value[l] & !field) | (u64::from(rank[l] & 0x7f) + 1) << RANK_SHIFT
            });
            put_any(warp, wide, d, &value, mask);
        }
        PtxOp::GetRank { wide, d, a, .. } => {
            let own = warp.block;
            let value = any_width(warp, wide, a);
            let value = map1(&value, |v: u64| {
                ((v >> RANK_SHIFT) as u32 & 0xff)
                    .checked_sub(1)
                    .unwrap_or(own)
            });
            warp.put(d, &value, mask);
        }
        _ => return false,
    }
    true
}

fn is_own(own: u64, address: u64) -> bool {
    let rank = address >> RANK_SHIFT & 0xff;
    rank == 0 || rank == own
}

/// Returns true if a generic address is in a space.
pub fn is_in(space: StateSpace, address: u64) -> bool {
    let window = |start: u64| (start..start + WINDOW).contains(&address);
    match space {
        StateSpace::Shared => window(SHARED_WINDOW),
        StateSpace::Local => window(LOCAL_WINDOW),
        StateSpace::Param => window(PARAM_WINDOW),
        _ => !window(SHARED_WINDOW) && !window(LOCAL_WINDOW) && !window(PARAM_WINDOW),
    }
}

fn any_width(warp: &Warp, wide: bool, a: RowIndex) -> Doubles {
    if wide {
        *warp.double(a)
    } else {
        map1(warp.word(a), u64::from)
    }
}

fn put_any(warp: &mut Warp, wide: bool, d: RowIndex, value: &Doubles, mask: u32) {
    if wide {
        warp.put_double(d, value, mask)
    } else {
        warp.put(d, &map1(value, |v: u64| v as u32), mask)
    }
}

fn address(
    warp: &mut Warp,
    wide: bool,
    d: RowIndex,
    a: RowIndex,
    mask: u32,
    f: impl Fn(u64) -> u64,
) {
    let value = map1(&any_width(warp, wide, a), f);
    put_any(warp, wide, d, &value, mask);
}
