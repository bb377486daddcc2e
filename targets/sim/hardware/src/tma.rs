//! TMA: the pieces of a box and their places in shared and global memory.
//!
//! A box lies in shared memory row-major without gaps, dimension 0 innermost,
//! each 16-byte chunk at the swizzled address of its place. Element
//! `(j0, j1, ...)` of the box is the tensor's `(c0 + j0, c1 + s1 j1, ...)`,
//! `c` the coordinates and `s` the element strides.

use crate::float::{bf16_from_f32, f16_from_f32, f32_from_bf16, f32_from_f16};
use crate::swizzle::Swizzle;
use crate::tensor_map::{ElementType, OobFill, TensorMap};
use std::fmt;

/// One piece of a box: at most 16 bytes, contiguous on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoxPiece {
    /// Shared-memory address, swizzled.
    pub shared: u32,
    /// Global address; `None` outside the tensor, where loads write the fill
    /// value and stores and reductions do nothing.
    pub global: Option<u64>,
    /// Bytes, 1 to 16.
    pub bytes: u32,
}

/// A reason that a copy cannot run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TmaError {
    /// The shared address of a box is no multiple of 128.
    SharedAddress(u32),
    /// The number of coordinates is not the number of dimensions of the map.
    Rank {
        /// Coordinates of the instruction.
        asked: usize,
        /// Dimensions of the map.
        map: u32,
    },
    /// The innermost row is shorter than the swizzle's span, a layout that no
    /// hardware has confirmed.
    NarrowSwizzle {
        /// Bytes of the row.
        bytes: u32,
        /// Bytes of the span.
        span: u32,
    },
}

impl fmt::Display for TmaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TmaError::SharedAddress(at) => write!(
                f,
                "a box in shared memory must be aligned to 128 bytes, not lie at {at:#x}"
            ),
            TmaError::Rank { asked, map } => write!(
                f,
                "the copy names {asked} coordinates, its tensor map has {map} dimensions"
            ),
            TmaError::NarrowSwizzle { bytes, span } => write!(
                f,
                "rows of {bytes} bytes under a swizzle of {span}: how hardware lays them out is \
                 not confirmed; make the row as long as the span"
            ),
        }
    }
}

impl std::error::Error for TmaError {}

/// Calls `visit` with every move of the box whose first element has these
/// coordinates (innermost first; negative and beyond the tensor are allowed).
/// The box lies at shared-memory address `shared`. `map` must be valid.
///
/// # Errors
/// [`TmaError`]; `visit` was not called in that case.
pub fn box_moves(
    map: &TensorMap,
    coordinates: &[i32],
    shared: u32,
    mut visit: impl FnMut(BoxPiece),
) -> Result<(), TmaError> {
    check(map, coordinates, shared)?;
    let rank = map.rank as usize;
    let taken: [u32; 5] = std::array::from_fn(|dim| if dim < rank { map.taken(dim) } else { 1 });
    let rows: u32 = taken[1..].iter().product();
    // The loop counts rows of the box that are really taken: with an element
    // stride above 1 the box is smaller in shared memory than `tile` says (PTX
    // ISA, "Traversal-Stride").
    for row in 0..rows {
        let start = row_start(map, coordinates, &taken, row);
        let at = shared.wrapping_add(row * map.row_bytes());
        row_moves(map, coordinates[0], start, at, &mut visit);
    }
    Ok(())
}

fn check(map: &TensorMap, coordinates: &[i32], shared: u32) -> Result<(), TmaError> {
    let (asked, rank) = (coordinates.len(), map.rank);
    if asked != rank as usize {
        return Err(TmaError::Rank { asked, map: rank });
    }
    // 128 bytes, whatever the swizzle (PTX ISA, "cp.async.bulk.tensor"). The
    // alignment of the global side is a rule of the tensor map.
    if !shared.is_multiple_of(128) {
        return Err(TmaError::SharedAddress(shared));
    }
    let (bytes, span) = (map.row_bytes(), map.swizzle.span());
    if map.swizzle != Swizzle::None && bytes != span {
        Err(TmaError::NarrowSwizzle { bytes, span })
    } else {
        Ok(())
    }
}

/// Returns the global address of element 0 of dimension 0 in row `row` of the
/// box, or `None` when the row is outside the tensor.
fn row_start(map: &TensorMap, coordinates: &[i32], taken: &[u32; 5], row: u32) -> Option<u64> {
    let (mut rest, mut address) = (row, map.address);
    for dim in 1..map.rank as usize {
        let step = (rest % taken[dim]) * map.element_strides[dim];
        rest /= taken[dim];
        // Coordinates are signed 32 bits: a box may begin before the tensor,
        // and its outside rows are filled rather than refused (PTX ISA, "Out of
        // Boundary Access"). A negative index fails the conversion.
        let index = u64::try_from(i64::from(coordinates[dim]) + i64::from(step)).ok()?;
        if index >= map.dims[dim] {
            return None;
        }
        address = address.wrapping_add(index.wrapping_mul(map.strides[dim - 1]));
    }
    Some(address)
}

/// Visits the moves of one row: chunks of 16 bytes, cut where the tensor begins
/// and ends.
fn row_moves(
    map: &TensorMap,
    first: i32,
    start: Option<u64>,
    shared: u32,
    visit: &mut impl FnMut(BoxPiece),
) {
    let size = i64::from(map.element.bytes());
    let (bytes, first) = (i64::from(map.row_bytes()), i64::from(first) * size);
    // The product with the element size must not overflow for tensors of 2^32
    // elements and more; `i64::MAX / 16` leaves room for 8-byte elements.
    let extent = i64::try_from(map.dims[0]).unwrap_or(i64::MAX / 16) * size;
    let inside = match start {
        Some(_) => (-first).clamp(0, bytes)..(extent - first).clamp(0, bytes),
        None => 0..0,
    };
    let mut at = 0;
    // The swizzle permutes whole 16-byte chunks, so a move never crosses one;
    // the edges of the tensor cut further, because only bytes inside may be
    // read or written.
    while at < bytes {
        let chunk_end = at / 16 * 16 + 16;
        let edge = [inside.start, inside.end].into_iter().filter(|e| *e > at);
        let end = edge.min().unwrap_or(chunk_end).min(chunk_end);
        let global = start.filter(|_| inside.contains(&at));
        visit(BoxPiece {
            shared: map.swizzle.apply(shared.wrapping_add(at as u32)),
            global: global.map(|start| start.wrapping_add_signed(first + at)),
            bytes: (end - at) as u32,
        });
        at = end;
    }
}

/// Returns the 16 bytes that a load writes outside the tensor.
pub fn fill(map: &TensorMap) -> [u8; 16] {
    let ones = |bytes: &[u8]| std::array::from_fn(|i| bytes[i % bytes.len()]);
    match (map.fill, map.element.bytes()) {
        (OobFill::Zero, _) => [0; 16],
        (OobFill::Nan, 2) => ones(&[0xff, 0x7f]),
        (OobFill::Nan, 4) => ones(&[0xff, 0xff, 0xff, 0x7f]),
        (OobFill::Nan, _) => ones(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]),
    }
}

/// An operation of `cp.reduce.async.bulk` on the old and the new value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BulkReduction {
    /// The sum.
    Add,
    /// The smaller value.
    Min,
    /// The larger value.
    Max,
    /// Bitwise and, integers only.
    And,
    /// Bitwise or, integers only.
    Or,
    /// Bitwise exclusive or, integers only.
    Xor,
}

/// Applies an integer reduction to elements of a type.
macro_rules! integers {
    ($type:ty, $op:expr, $memory:expr, $value:expr) => {
        each(
            $memory,
            $value,
            <$type>::from_le_bytes,
            <$type>::to_le_bytes,
            |a, b| match $op {
                BulkReduction::Add => a.wrapping_add(b),
                BulkReduction::Min => a.min(b),
                BulkReduction::Max => a.max(b),
                BulkReduction::And => a & b,
                BulkReduction::Or => a | b,
                BulkReduction::Xor => a ^ b,
            },
        )
    };
}

/// Computes `memory = memory op value`, element by element. Both slices have
/// the same length, a multiple of the element's size. Sums of floats round to
/// nearest even and keep denormals; minimum and maximum prefer a number to a
/// NaN.
///
/// # Errors
/// [`ReduceError`] when TMA has no such operation.
pub fn reduce(
    op: BulkReduction,
    element: ElementType,
    memory: &mut [u8],
    value: &[u8],
) -> Result<(), ReduceError> {
    use ElementType as E;
    let error = ReduceError { op, element };
    match element {
        E::U32 => integers!(u32, op, memory, value),
        E::U64 => integers!(u64, op, memory, value),
        E::S32 => integers!(i32, op, memory, value),
        E::S64 => integers!(i64, op, memory, value),
        E::F16 | E::Bf16 => half(error, memory, value)?,
        E::F32 if op == BulkReduction::Add => {
            let (read, write) = (f32::from_le_bytes, f32::to_le_bytes);
            each(memory, value, read, write, |a, b| a + b);
        }
        E::F64 if op == BulkReduction::Add => {
            let (read, write) = (f64::from_le_bytes, f64::to_le_bytes);
            each(memory, value, read, write, |a, b| a + b);
        }
        // PTX ISA, "cp.reduce.async.bulk": f32 and f64 have `.add` alone, and
        // integers below 32 bits nothing.
        E::U8 | E::U16 | E::F32 | E::F64 => return Err(error),
    }
    Ok(())
}

fn each<T, const N: usize>(
    memory: &mut [u8],
    value: &[u8],
    read: fn([u8; N]) -> T,
    write: fn(T) -> [u8; N],
    op: impl Fn(T, T) -> T,
) {
    for (old, new) in memory.chunks_exact_mut(N).zip(value.chunks_exact(N)) {
        let pair = (
            std::array::from_fn(|i| old[i]),
            std::array::from_fn(|i| new[i]),
        );
        old.copy_from_slice(&write(op(read(pair.0), read(pair.1))));
    }
}

/// Applies a reduction to 16-bit floats, computed in f32.
fn half(asked: ReduceError, memory: &mut [u8], value: &[u8]) -> Result<(), ReduceError> {
    let op = match asked.op {
        BulkReduction::Add => |a: f32, b: f32| a + b,
        BulkReduction::Min => |a, b| ordered(a, b).0,
        BulkReduction::Max => |a, b| ordered(a, b).1,
        _ => return Err(asked),
    };
    type Halves = (fn(u16) -> f32, fn(f32) -> u16);
    let (widen, narrow): Halves = match asked.element {
        ElementType::F16 => (f32_from_f16, f16_from_f32),
        _ => (f32_from_bf16, bf16_from_f32),
    };
    let sum = |a, b| narrow(op(widen(a), widen(b)));
    each(memory, value, u16::from_le_bytes, u16::to_le_bytes, sum);
    Ok(())
}

/// Returns the smaller and the larger value; -0 is below +0, and a NaN loses to
/// a number.
fn ordered(a: f32, b: f32) -> (f32, f32) {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => (b, b),
        (_, true) => (a, a),
        _ if a.total_cmp(&b).is_le() => (a, b),
        _ => (b, a),
    }
}

/// A reduction that TMA does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReduceError {
    /// The operation.
    pub op: BulkReduction,
    /// The element type of the operation.
    pub element: ElementType,
}

impl fmt::Display for ReduceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TMA has no {:?} of {:?}", self.op, self.element)
    }
}

impl std::error::Error for ReduceError {}

#[cfg(test)]
#[path = "tma_tests.rs"]
mod tests;
