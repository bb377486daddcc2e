//! The elements of a collective, and how they are reduced.

use std::fmt;

/// The type of exchanged elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Element {
    /// IEEE binary32.
    F32 = 1,
    /// The upper half of a binary32; sums are taken in f32 and rounded once.
    Bf16 = 2,
    /// IEEE binary16; sums are taken in f32 and rounded once.
    F16 = 3,
    /// Two's complement, 32 bits; sums wrap around.
    I32 = 4,
    /// Two's complement, 64 bits; sums wrap around.
    I64 = 5,
    /// A byte, or opaque data that are only moved; sums wrap around.
    U8 = 6,
}

impl Element {
    /// Every type.
    pub const ALL: [Element; 6] = [
        Element::F32,
        Element::Bf16,
        Element::F16,
        Element::I32,
        Element::I64,
        Element::U8,
    ];

    /// Returns the bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Element::U8 => 1,
            Element::Bf16 | Element::F16 => 2,
            Element::F32 | Element::I32 => 4,
            Element::I64 => 8,
        }
    }

    /// Returns the lower-case name: `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            Element::F32 => "f32",
            Element::Bf16 => "bf16",
            Element::F16 => "f16",
            Element::I32 => "i32",
            Element::I64 => "i64",
            Element::U8 => "u8",
        }
    }

    /// Returns the element type of a code in a message.
    pub fn from_code(code: u8) -> Option<Element> {
        Element::ALL.into_iter().find(|e| *e as u8 == code)
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The operator of a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Reduction {
    /// `((x0 + x1) + x2) + ...` in the order of the ranks.
    Sum = 1,
    /// The largest value; NaN if there is one.
    Max = 2,
    /// The smallest value; NaN if there is one.
    Min = 3,
}

impl Reduction {
    /// Every reduction.
    pub const ALL: [Reduction; 3] = [Reduction::Sum, Reduction::Max, Reduction::Min];

    /// Returns the lower-case name: `sum`.
    pub const fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Max => "max",
            Reduction::Min => "min",
        }
    }

    /// Returns the reduction of a code in a message.
    pub fn from_code(code: u8) -> Option<Reduction> {
        Reduction::ALL.into_iter().find(|r| *r as u8 == code)
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
