//! Operands of loads, stores and atomics.

use super::{Number, RowIndex};
use crate::text::StateSpace;

/// The source of an address.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Base {
    Word(RowIndex),
    Double(RowIndex),
    /// The offset alone.
    Fixed,
}

/// An address: a base and an offset.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Address {
    pub base: Base,
    pub offset: i64,
}

/// The ordering and scope of an access, as far as the checks need them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryOrder {
    Weak,
    /// `.volatile` and `.relaxed`: never races by itself and orders nothing.
    Relaxed,
    Acquire,
    Release,
    AcquireRelease,
}

/// A load or a store.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryAccess {
    pub space: StateSpace,
    /// Shared addresses may belong to another block of the cluster.
    pub cluster: bool,
    pub address: Address,
    /// Bytes of one element.
    pub bytes: u8,
    /// Loads narrower than the register extend the sign.
    pub signed: bool,
    /// The rows are of the 64-bit file.
    pub wide: bool,
    pub rows: Vec<RowIndex>,
    pub order: MemoryOrder,
    /// `.nc`: nobody writes the bytes during the launch.
    pub constant: bool,
}

/// The operation of an atomic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicKind {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exchange,
    CompareSwap,
    Increment,
    Decrement,
}

/// The type that an atomic works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicType {
    Number(Number),
    /// Two halves in 32 bits.
    Pair(Number),
}

/// An `atom` or `red` instruction.
#[derive(Clone, Debug, PartialEq)]
pub struct Atomic {
    pub space: StateSpace,
    pub cluster: bool,
    pub address: Address,
    pub kind: AtomicKind,
    pub ty: AtomicType,
    pub bytes: u8,
    pub wide: bool,
    /// Rows of the old values; empty for `red`.
    pub results: Vec<RowIndex>,
    pub operands: Vec<RowIndex>,
    /// Row of the new value of a compare-and-swap.
    pub swap: RowIndex,
    pub order: MemoryOrder,
}
