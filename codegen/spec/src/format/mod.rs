//! Formats of quantised weights, as data, and their decoders.
//!
//! A [`Format`] says what the codes of a matrix are, how they are packed, and which scales and
//! zero points belong to them; [`FORMATS`] lists the published ones. [`Matrices`] decodes
//! what such a format stores, to the bit. [`Blocks`] is the same for GGUF, whose
//! blocks have codes and scales side by side; [`BLOCKS`] lists those. A format that is new
//! is a row of one of the two tables.
//!
//! A weight is `code * scale` in f32: the integer code less its zero point, or the float that
//! the code stands for, times the scale widened to f32. With a second scale, the scale is first
//! multiplied or divided by that, and rounded to f32.

mod blocks;
pub mod code;
mod matrices;
#[cfg(test)]
mod tests;

pub use blocks::{BLOCKS, Blocks, LARGEST, Unpacked};
pub use matrices::{Matrices, Scales, Zeros};

/// A format of quantised matrices `[rows, columns]`, where rows are output features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// The published name.
    pub name: &'static str,
    /// The type of a code.
    pub element: Element,
    /// The order of codes in memory.
    pub packing: Packing,
    /// The elements that share a scale.
    pub block: Block,
    /// The type of a scale.
    pub scale: ScaleType,
    /// A scale of a whole matrix on top of those of blocks.
    pub second: Option<Second>,
    /// What is taken from an integer code.
    pub zero: Zero,
}

/// The type of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// FP8 of four bits of exponent, three of mantissa.
    E4m3,
    /// FP8 of five bits of exponent, two of mantissa.
    E5m2,
    /// FP4 of two bits of exponent, one of mantissa.
    E2m1,
    /// A byte in two's complement.
    Int8,
    /// An integer from zero on, of 2, 3, 4 or 8 bits, which has a zero point.
    Uint(u8),
}

/// The order of codes in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Row by row, the codes of a row side by side, the first in the lowest bits of
    /// little-endian words of so many bits; each row begins with a word.
    Rows {
        /// Bits of a word: 8 or 32.
        word: u8,
    },
    /// GPTQ's: words of 32 bits `[columns * bits / 32, rows]`, each with codes that follow
    /// one another in a row, the first in the lowest bits. Scales are `[groups, rows]`.
    Columns,
    /// AWQ's: words of 32 bits `[columns, rows / 8]`, each with a column's codes of eight
    /// rows, in the order 0 2 4 6 1 3 5 7. Scales are `[groups, rows]`.
    Interleaved,
}

/// The elements that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Block {
    /// So many rows and columns; the last of a matrix may be fewer.
    Tile([usize; 2]),
    /// A row.
    Row,
    /// A matrix or a row: the scales' shape says which.
    MatrixOrRow,
}

/// The type of a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleType {
    /// f32.
    F32,
    /// f16.
    F16,
    /// bf16.
    Bf16,
    /// A power of two.
    E8m0,
    /// FP8.
    E4m3,
}

/// How a second scale is applied to the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Second {
    /// Scales are multiplied by it.
    Times,
    /// Scales are divided by it.
    Divided,
}

/// What is taken from an integer code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zero {
    /// Nothing, or a zero point for each scale, of the codes' type, where there are some.
    None,
    /// Half of the range, or a zero point for each scale, packed along the rows, where there
    /// are some.
    Middle,
    /// A zero point for each scale, packed along the rows.
    Stored,
    /// As [`Zero::Stored`], each stored less one.
    LessOne,
}

impl Element {
    /// Returns the bits of a code.
    pub fn bits(self) -> usize {
        match self {
            Element::E4m3 | Element::E5m2 | Element::Int8 => 8,
            Element::E2m1 => 4,
            Element::Uint(bits) => usize::from(bits),
        }
    }

    /// Whether it is an integer.
    pub fn is_int(self) -> bool {
        matches!(self, Element::Int8 | Element::Uint(_))
    }
}

impl ScaleType {
    /// Returns the bytes of a scale.
    pub fn size(self) -> usize {
        match self {
            ScaleType::F32 => 4,
            ScaleType::F16 | ScaleType::Bf16 => 2,
            ScaleType::E8m0 | ScaleType::E4m3 => 1,
        }
    }

    /// Widens the scale at an index to f32, exactly.
    pub fn read(self, bytes: &[u8], index: usize) -> f32 {
        let bytes = &bytes[index * self.size()..];
        match self {
            ScaleType::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            ScaleType::F16 => code::f16(u16::from_le_bytes([bytes[0], bytes[1]])),
            ScaleType::Bf16 => code::bf16(u16::from_le_bytes([bytes[0], bytes[1]])),
            ScaleType::E8m0 => code::e8m0(bytes[0]),
            ScaleType::E4m3 => code::E4M3[usize::from(bytes[0])],
        }
    }
}

const ROWS: Packing = Packing::Rows { word: 8 };

/// FP8 E4M3 with one scale for a matrix or a row.
pub const FP8: Format = Format {
    name: "fp8",
    element: Element::E4m3,
    packing: ROWS,
    block: Block::MatrixOrRow,
    scale: ScaleType::F32,
    second: None,
    zero: Zero::None,
};

/// DeepSeek-V3's FP8.
pub const FP8_BLOCK: Format = Format {
    name: "fp8-block",
    block: Block::Tile([128, 128]),
    ..FP8
};

/// FP8 with a power of two for 32 columns (OCP).
pub const MXFP8: Format = Format {
    name: "mxfp8",
    block: Block::Tile([1, 32]),
    scale: ScaleType::E8m0,
    ..FP8
};

/// FP4 with a power of two for 32 columns (OCP).
pub const MXFP4: Format = Format {
    name: "mxfp4",
    element: Element::E2m1,
    ..MXFP8
};

/// NVIDIA's FP4 with FP8 scales for 16 columns, as ModelOpt writes it.
pub const NVFP4: Format = Format {
    name: "nvfp4",
    block: Block::Tile([1, 16]),
    scale: ScaleType::E4m3,
    second: Some(Second::Times),
    ..MXFP4
};

/// NVIDIA's FP4 as compressed-tensors writes it: the second scale is the inverse.
pub const NVFP4_DIVIDED: Format = Format {
    name: "nvfp4-pack-quantized",
    second: Some(Second::Divided),
    ..NVFP4
};

/// compressed-tensors' bytes, one scale for a matrix or a row.
pub const INT8: Format = Format {
    name: "int-quantized",
    element: Element::Int8,
    scale: ScaleType::Bf16,
    ..FP8
};

/// compressed-tensors' integers, eight to a word.
pub const INT4: Format = Format {
    name: "pack-quantized",
    element: Element::Uint(4),
    packing: Packing::Rows { word: 32 },
    block: Block::Tile([1, 32]),
    zero: Zero::Middle,
    ..INT8
};

/// GPTQ's integers; their checkpoints store zero points less one.
pub const GPTQ: Format = Format {
    name: "gptq",
    packing: Packing::Columns,
    block: Block::Tile([1, 128]),
    scale: ScaleType::F16,
    zero: Zero::LessOne,
    ..INT4
};

/// The second version of GPTQ's checkpoints.
pub const GPTQ_V2: Format = Format {
    name: "gptq_v2",
    zero: Zero::Stored,
    ..GPTQ
};

/// AWQ's integers, as its `gemm` version packs them.
pub const AWQ: Format = Format {
    name: "awq",
    packing: Packing::Interleaved,
    ..GPTQ_V2
};

/// The published formats. Sizes of blocks and bits of integers are the usual ones; a
/// checkpoint may say others.
pub const FORMATS: &[Format] = &[
    FP8,
    FP8_BLOCK,
    MXFP8,
    MXFP4,
    NVFP4,
    NVFP4_DIVIDED,
    INT8,
    INT4,
    GPTQ,
    GPTQ_V2,
    AWQ,
];
