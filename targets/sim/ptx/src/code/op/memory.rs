//! Loads, stores and atomics.

use super::{Number, Row};
use crate::text::Space;

/// Where an address comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Base {
    Word(Row),
    Double(Row),
    /// The offset alone.
    Fixed,
}

/// An address: a base and an offset.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Address {
    pub base: Base,
    pub offset: i64,
}

/// Ordering and scope of an access, as far as checks care.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Weak,
    /// `.volatile`, `.relaxed`: no race by itself, orders nothing.
    Relaxed,
    Acquire,
    Release,
    AcquireRelease,
}

/// A load or a store.
#[derive(Clone, Debug, PartialEq)]
pub struct Access {
    pub space: Space,
    /// Shared addresses may be of another block of the cluster.
    pub cluster: bool,
    pub address: Address,
    /// Bytes of one element.
    pub bytes: u8,
    /// Sign-extend loads narrower than the register.
    pub signed: bool,
    /// Rows of the 64-bit file.
    pub wide: bool,
    pub rows: Vec<Row>,
    pub order: Order,
    /// `.nc`: nobody writes it during the launch.
    pub constant: bool,
}

/// What an atomic does.
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

/// The type an atomic works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicType {
    Number(Number),
    /// Two halves in 32 bits.
    Pair(Number),
}

/// `atom` or `red`.
#[derive(Clone, Debug, PartialEq)]
pub struct Atomic {
    pub space: Space,
    pub cluster: bool,
    pub address: Address,
    pub kind: AtomicKind,
    pub ty: AtomicType,
    pub bytes: u8,
    pub wide: bool,
    /// Old values; empty for `red`.
    pub results: Vec<Row>,
    pub operands: Vec<Row>,
    /// The new value of a compare and swap.
    pub swap: Row,
    pub order: Order,
}
