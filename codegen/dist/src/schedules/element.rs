//! The elements of a collective, and how they are reduced.

use std::fmt;

/// The type of exchanged elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum CommElement {
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

impl CommElement {
    /// Every type.
    pub const ALL: [CommElement; 6] = [
        CommElement::F32,
        CommElement::Bf16,
        CommElement::F16,
        CommElement::I32,
        CommElement::I64,
        CommElement::U8,
    ];

    /// Returns the bytes per element.
    pub const fn size(self) -> usize {
        match self {
            CommElement::U8 => 1,
            CommElement::Bf16 | CommElement::F16 => 2,
            CommElement::F32 | CommElement::I32 => 4,
            CommElement::I64 => 8,
        }
    }

    /// Returns the lower-case name: `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            CommElement::F32 => "f32",
            CommElement::Bf16 => "bf16",
            CommElement::F16 => "f16",
            CommElement::I32 => "i32",
            CommElement::I64 => "i64",
            CommElement::U8 => "u8",
        }
    }

    /// Returns the element type of a code in a message.
    pub fn from_code(code: u8) -> Option<CommElement> {
        CommElement::ALL.into_iter().find(|e| *e as u8 == code)
    }
}

impl fmt::Display for CommElement {
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
