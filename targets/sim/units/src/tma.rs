//! The copy engine: which bytes of a box move where.

use crate::tensor_map::{ElementType, TensorMap};
use std::fmt;

/// One piece of a box: at most 16 bytes, contiguous on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Shared-memory address, swizzled.
    pub shared: u32,
    /// Global address; `None` outside the tensor, where loads fill and stores
    /// and reductions do nothing.
    pub global: Option<u64>,
    /// Bytes, 1 to 16.
    pub bytes: u32,
}

/// Why a copy cannot be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TmaError {
    /// The shared address of a box is no multiple of 128.
    SharedAddress(u32),
    /// The coordinates are not as many as the map has dimensions.
    Rank {
        /// Of the instruction.
        asked: usize,
        /// Of the map.
        map: u32,
    },
    /// The innermost row is shorter than the swizzle's span: how hardware
    /// lays that out has not been confirmed.
    NarrowSwizzle {
        /// Bytes of the row.
        bytes: u32,
        /// Bytes of the span.
        span: u32,
    },
}

impl fmt::Display for TmaError {
    fn fmt(&self, _f: &mut fmt::Formatter<'_>) -> fmt::Result {
        todo!()
    }
}

impl std::error::Error for TmaError {}

/// Calls `visit` with every move of the box whose first element has these
/// coordinates (innermost first; may be negative or beyond the tensor), with
/// the box at shared-memory address `shared`. `map` must be valid.
///
/// # Errors
/// [`TmaError`]; `visit` was not called.
pub fn box_moves(
    map: &TensorMap,
    coordinates: &[i32],
    shared: u32,
    visit: impl FnMut(Move),
) -> Result<(), TmaError> {
    let _ = (map, coordinates, shared, visit);
    todo!()
}

/// The 16 bytes that a load puts outside the tensor.
pub fn fill(map: &TensorMap) -> [u8; 16] {
    let _ = map;
    todo!()
}

/// What `cp.reduce.async.bulk` does with old and new.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Sum.
    Add,
    /// Smaller.
    Min,
    /// Larger.
    Max,
    /// Bitwise and, integers only.
    And,
    /// Bitwise or, integers only.
    Or,
    /// Bitwise exclusive or, integers only.
    Xor,
}

/// `memory = memory op value`, element by element; both of the same length, a
/// multiple of the element's size. Narrow floats are added in f32 and rounded
/// to nearest even.
///
/// # Errors
/// [`ReduceError`] when the engine has no such operation.
pub fn reduce(
    op: Reduction,
    element: ElementType,
    memory: &mut [u8],
    value: &[u8],
) -> Result<(), ReduceError> {
    let _ = (op, element, memory, value);
    todo!()
}

/// A reduction that the engine does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReduceError {
    /// The operation.
    pub op: Reduction,
    /// Of these elements.
    pub element: ElementType,
}

impl fmt::Display for ReduceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the copy engine has no {:?} of {:?}",
            self.op, self.element
        )
    }
}

impl std::error::Error for ReduceError {}
