//! Formats of quantized weights as data, their decoders and encoders.
//!
//! A [`Format`] describes the codes of a matrix, their packing, and the scales and zero points that
//! belong to them; [`FORMATS`] lists the published ones. [`Matrices`] decodes them bit by bit as
//! their authors do, and [`Format::encode`] makes them. [`Blocks`] is the counterpart for GGUF,
//! whose blocks hold codes and scales side by side; [`BLOCKS`] lists those. To add a format, add a
//! row to one of the two tables.
//!
//! A weight is `code * scale` in f32. The code is an integer less its zero point, or the value of a
//! small float; the scale is widened to f32. A second scale first multiplies or divides the scale,
//! and that product is rounded to f32.

mod blocks;
pub mod code;
mod encode;
mod encode_blocks;
#[cfg(test)]
mod encode_tests;
pub mod layout;
mod matrices;
mod stored;
#[cfg(test)]
mod tests;

use moesaic_kernel::DType;
use serde::{Deserialize, Serialize};

pub use blocks::{BLOCKS, BlockScales, Blocks, LARGEST};
pub(crate) use code::NONLINEAR;
pub use encode::{EncodeError, EncodeOptions, Encoded};
pub use matrices::{Matrices, Scales, Zeros};
pub use stored::{PublishedCodes, StoredError, StoredMatrix};

/// A format of quantized matrices `[rows, columns]`, where rows are output features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// The published name.
    pub name: &'static str,
    /// The type of a code.
    pub element: CodeType,
    /// The order of codes in memory.
    pub packing: CodeOrder,
    /// The block of elements that shares one scale.
    pub block: ScaleBlock,
    /// The type of a scale.
    pub scale: ScaleType,
    /// A scale per matrix on top of those per block.
    pub second: Option<Second>,
    /// The zero point of integer codes.
    pub zero: Zero,
}

/// The type of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeType {
    /// FP8 with 4 exponent and 3 mantissa bits.
    E4m3,
    /// FP8 with 5 exponent and 2 mantissa bits.
    E5m2,
    /// FP6 with 2 exponent and 3 mantissa bits.
    E2m3,
    /// FP4 with 2 exponent bits and 1 mantissa bit.
    E2m1,
    /// A signed byte in two's complement.
    Int8,
    /// An unsigned integer of 1 to 8 bits, with a zero point.
    Uint(u8),
}

/// The order of codes in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeOrder {
    /// Row by row. The codes of a row are side by side in little-endian words, the first in the
    /// lowest bits, and each row starts a new word.
    Rows {
        /// Bits of a word: 8 or 32.
        word: u8,
    },
    /// GPTQ's order: 32-bit words `[columns * bits / 32, rows]`, each with consecutive codes of one
    /// row, the first in the lowest bits. Scales are `[groups, rows]`.
    Columns,
    /// AWQ's order: 32-bit words `[columns, rows / 8]`, each with one column's codes of eight rows
    /// in the order 0 2 4 6 1 3 5 7. Scales are `[groups, rows]`.
    Interleaved,
    /// ModelOpt's order of stacks whose rows are input features: bytes `[rows / 2, columns]`, each
    /// with one column's codes of two rows, the first in the low half.
    RowPairs,
}

/// The block of elements that shares one scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleBlock {
    /// Rows and columns of a tile; the last tile of a matrix may be smaller.
    Tile([usize; 2]),
    /// One row.
    Row,
    /// One matrix or one row; the shape of the scales tells.
    MatrixOrRow,
}

/// The type of a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
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
    /// A byte in two's complement.
    Int8,
}

/// The effect of the second scale on the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Second {
    /// Multiplies it.
    Times,
    /// Divides it.
    Divided,
}

/// The number subtracted from an integer code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zero {
    /// Zero, or stored zero points of the codes' type, one per scale, if the checkpoint has them.
    None,
    /// Half of the range, or stored zero points, one per scale and packed along the rows, if the
    /// checkpoint has them.
    Middle,
    /// A stored zero point per scale, packed along the rows.
    Stored,
    /// As [`Zero::Stored`], except that the file holds each zero point less one.
    LessOne,
}

impl CodeType {
    /// Returns the bits of a code.
    pub fn bits(self) -> usize {
        match self {
            CodeType::E4m3 | CodeType::E5m2 | CodeType::Int8 => 8,
            CodeType::E2m3 => 6,
            CodeType::E2m1 => 4,
            CodeType::Uint(bits) => usize::from(bits),
        }
    }

    /// Returns true if the code is an integer.
    pub fn is_int(self) -> bool {
        matches!(self, CodeType::Int8 | CodeType::Uint(_))
    }
}

impl ScaleType {
    /// Returns the bytes of a scale.
    pub fn size(self) -> usize {
        match self {
            ScaleType::F32 => 4,
            ScaleType::F16 | ScaleType::Bf16 => 2,
            ScaleType::E8m0 | ScaleType::E4m3 | ScaleType::Int8 => 1,
        }
    }

    /// Returns the element type of such scales; `None` for bytes, for which tensors have none.
    pub fn dtype(self) -> Option<DType> {
        match self {
            ScaleType::F32 => Some(DType::F32),
            ScaleType::F16 => Some(DType::F16),
            ScaleType::Bf16 => Some(DType::Bf16),
            ScaleType::E8m0 | ScaleType::E4m3 | ScaleType::Int8 => None,
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
            ScaleType::Int8 => f32::from(bytes[0] as i8),
        }
    }
}

const ROWS: CodeOrder = CodeOrder::Rows { word: 8 };

/// FP8 E4M3 with one scale for a matrix or a row.
pub const FP8: Format = Format {
    name: "fp8",
    element: CodeType::E4m3,
    packing: ROWS,
    block: ScaleBlock::MatrixOrRow,
    scale: ScaleType::F32,
    second: None,
    zero: Zero::None,
};

/// DeepSeek-V3's FP8 with f32 scales per tile.
pub const FP8_BLOCK: Format = Format {
    name: "fp8-block",
    block: ScaleBlock::Tile([128, 128]),
    ..FP8
};

/// FP8 with a power-of-two scale per 32 columns (OCP).
pub const MXFP8: Format = Format {
    name: "mxfp8",
    block: ScaleBlock::Tile([1, 32]),
    scale: ScaleType::E8m0,
    ..FP8
};

/// FP6 with a power-of-two scale per 32 columns (OCP), as compressed-tensors writes it.
pub const MXFP6: Format = Format {
    name: "mxfp6-pack-quantized",
    element: CodeType::E2m3,
    ..MXFP8
};

/// FP4 with a power-of-two scale per 32 columns (OCP).
pub const MXFP4: Format = Format {
    name: "mxfp4",
    element: CodeType::E2m1,
    ..MXFP8
};

/// NVIDIA's FP4 with an FP8 scale per 16 columns, as ModelOpt writes it.
pub const NVFP4: Format = Format {
    name: "nvfp4",
    block: ScaleBlock::Tile([1, 16]),
    scale: ScaleType::E4m3,
    second: Some(Second::Times),
    ..MXFP4
};

/// NVIDIA's FP4 of stacked experts whose rows are input features, as ModelOpt writes Llama 4's.
pub const NVFP4_TURNED: Format = Format {
    name: "nvfp4 by rows",
    packing: CodeOrder::RowPairs,
    block: ScaleBlock::Tile([16, 1]),
    ..NVFP4
};

/// NVIDIA's FP4 as compressed-tensors writes it: the second scale is the inverse.
pub const NVFP4_DIVIDED: Format = Format {
    name: "nvfp4-pack-quantized",
    second: Some(Second::Divided),
    ..NVFP4
};

/// compressed-tensors' 8-bit integers, one scale per matrix or row.
pub const INT8: Format = Format {
    name: "int-quantized",
    element: CodeType::Int8,
    scale: ScaleType::Bf16,
    ..FP8
};

/// compressed-tensors' integers of 1 to 8 bits; those of odd widths straddle words.
pub const INT4: Format = Format {
    name: "pack-quantized",
    element: CodeType::Uint(4),
    packing: CodeOrder::Rows { word: 32 },
    block: ScaleBlock::Tile([1, 32]),
    zero: Zero::Middle,
    ..INT8
};

/// GPTQ's integers; its checkpoints store each zero point less one.
pub const GPTQ: Format = Format {
    name: "gptq",
    packing: CodeOrder::Columns,
    block: ScaleBlock::Tile([1, 128]),
    scale: ScaleType::F16,
    zero: Zero::LessOne,
    ..INT4
};

/// GPTQ's second checkpoint version, which stores zero points as they are.
pub const GPTQ_V2: Format = Format {
    name: "gptq_v2",
    zero: Zero::Stored,
    ..GPTQ
};

/// AWQ's integers, in the packing of its `gemm` version.
pub const AWQ: Format = Format {
    name: "awq",
    packing: CodeOrder::Interleaved,
    ..GPTQ_V2
};

/// The published formats, with their usual block sizes and integer widths. A checkpoint may state
/// others.
pub const FORMATS: &[Format] = &[
    FP8,
    FP8_BLOCK,
    MXFP8,
    MXFP6,
    MXFP4,
    NVFP4,
    NVFP4_TURNED,
    NVFP4_DIVIDED,
    INT8,
    INT4,
    GPTQ,
    GPTQ_V2,
    AWQ,
];
