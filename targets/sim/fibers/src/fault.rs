//! What can go wrong while a kernel runs.

use crate::block::Collective;
use crate::product::Shape;
use crate::stamp::Stamp;

/// Reading or writing, alone or as one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Atomic,
}

impl Kind {
    pub(crate) fn verb(self) -> &'static str {
        match self {
            Kind::Read => "reads",
            Kind::Write => "writes",
            Kind::Atomic => "adds to",
        }
    }
}

/// One access of the thread that runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    pub(crate) kind: Kind,
    /// The instruction behind it.
    pub(crate) from: usize,
}

/// Why the thread that runs cannot go on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// An access to what is not there, or not to be touched so.
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
    /// `match_any` of a value with more bits than it says.
    Wide { value: u32, bits: i32, line: i32 },
    /// A matrix product that the architecture does not have.
    NoProduct { shape: Shape, line: i32 },
    /// Lanes l and l + 16 bring different operands to a WMMA.
    Halves { line: i32 },
    /// Threads wait for others that never come.
    Deadlock,
    /// What the compiler's own checks found, with its facts.
    Defect {
        kind: i32,
        facts: *const u8,
        value: u64,
    },
}

/// What is wrong with an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Problem {
    /// Nothing of the launch is there.
    Outside,
    /// Nobody has written it.
    Unwritten,
    /// Not at a multiple of its size.
    Misaligned,
    /// A parameter that is only read.
    ReadOnly,
    /// The stack of another thread.
    Foreign(usize),
    /// Constants of the kernel.
    Constant,
}

/// The other side of a conflict.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Earlier {
    pub(crate) stamp: Stamp,
    pub(crate) wrote: bool,
    /// The instruction, if it is known.
    pub(crate) from: Option<usize>,
}
