//! The faults of a running kernel.

use crate::block::Collective;
use crate::product::Shape;
use crate::stamp::Stamp;

/// Reading, writing, or both as one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessKind {
    Read,
    Write,
    Atomic,
}

impl AccessKind {
    pub(crate) fn verb(self) -> &'static str {
        match self {
            AccessKind::Read => "reads",
            AccessKind::Write => "writes",
            AccessKind::Atomic => "adds to",
        }
    }
}

/// One access of the running thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    pub(crate) kind: AccessKind,
    /// Address of the instruction behind the access.
    pub(crate) from: usize,
}

/// The reason that the running thread cannot go on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// An access to memory that does not exist, or that forbids it.
    Memory(Access, Problem),
    /// An access out of order with an earlier one.
    Conflict(Access, Earlier),
    /// Lanes of one wave are at different collectives.
    Apart {
        here: (Collective, i32),
        there: (Collective, i32),
        /// One of the lanes that are there.
        lane: usize,
    },
    /// A `match_any` of a value with more bits than the call states.
    Wide { value: u32, bits: i32, line: i32 },
    /// A matrix product that the architecture does not have.
    NoProduct { shape: Shape, line: i32 },
    /// Lanes l and l + 16 hold different operands of a WMMA.
    Halves { line: i32 },
    /// Threads wait for others that never come.
    Deadlock,
    /// The compiler's own checks found a defect; `facts` describes it.
    Defect {
        kind: i32,
        facts: *const u8,
        value: u64,
    },
}

/// The defect of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Problem {
    /// No memory of the launch is there.
    Outside,
    /// Nothing has written the bytes.
    Unwritten,
    /// The address is no multiple of the size.
    Misaligned,
    /// The parameter is read-only.
    ReadOnly,
    /// The address is on the stack of another thread.
    Foreign(usize),
    /// The address is a constant of the kernel.
    Constant,
}

/// The other side of a conflict.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Earlier {
    pub(crate) stamp: Stamp,
    pub(crate) wrote: bool,
    /// The instruction, if known.
    pub(crate) from: Option<usize>,
}
