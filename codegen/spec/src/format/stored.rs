//! The canonical formats that hold published codes exactly.
//!
//! A layer multiplies codes in one of the canonical forms that [`WeightFormat`] describes.
//! [`PublishedCodes`] and [`Blocks`] tell which of them has the same numbers as a published matrix,
//! to the bit, and [`StoredMatrix`] decodes it.

use super::{BlockScales, Blocks, CodeType, Format, ScaleType, Zero, code};
use crate::{OffsetType, WeightCode, WeightFormat};

/// A format with nothing but one scale for a row.
const UNNAMED: WeightFormat = WeightFormat {
    name: "",
    code: WeightCode::Int8,
    block: [1, 0],
    scale: ScaleType::F32,
    second: None,
    offset: None,
    origin: "",
};

/// Published matrices with codes and scales in separate tensors, as far as their canonical format
/// depends on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishedCodes {
    /// The published format.
    pub format: Format,
    /// The type of the scales in the file, which may differ from the format's usual one.
    pub scale: ScaleType,
    /// Rows and columns that share a scale; 0 columns for a whole row.
    pub block: [usize; 2],
    /// Whether some zero point differs from the format's usual one.
    pub zeros: bool,
    /// Whether groups are consecutive columns.
    pub in_order: bool,
}

/// Published codes that no canonical format holds exactly.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoredError {
    /// Columns that share a scale are not consecutive.
    #[error(
        "columns share scales in no order (act-order), and codes of a layer share them in blocks"
    )]
    Unordered,
    /// The format that describes them is none that a layer can take.
    #[error("{problem}")]
    NoFormat {
        /// The rule of [`WeightFormat`] that it breaks.
        problem: String,
    },
}

impl PublishedCodes {
    /// Returns the canonical format that holds these codes exactly.
    ///
    /// # Errors
    ///
    /// [`StoredError`] says why there is none.
    pub fn stored(&self) -> Result<WeightFormat, StoredError> {
        if !self.in_order {
            return Err(StoredError::Unordered);
        }
        let stored = WeightFormat {
            code: self.code(),
            block: self.block,
            scale: self.scale,
            // One factor for a matrix is one for each row.
            second: self.format.second.map(|_| 0),
            offset: self.zeros.then_some(OffsetType::Zero),
            ..UNNAMED
        };
        match stored.problem() {
            None => Ok(stored.recognised()),
            Some(problem) => Err(StoredError::NoFormat { problem }),
        }
    }

    fn code(&self) -> WeightCode {
        match self.format.element {
            // E4M3 has every number of E2M3.
            CodeType::E4m3 | CodeType::E2m3 => WeightCode::E4m3,
            CodeType::E5m2 => WeightCode::E5m2,
            CodeType::E2m1 => WeightCode::E2m1,
            CodeType::Int8 | CodeType::Uint(5..) => WeightCode::Int8,
            CodeType::Uint(_) if self.zeros || self.format.zero == Zero::None => WeightCode::Uint4,
            CodeType::Uint(_) => WeightCode::Int4,
        }
    }

    /// Returns the canonical code of a published one.
    pub fn canonical(&self, code: u8) -> u8 {
        match self.format.element {
            CodeType::E2m3 => code::e2m3_as_e4m3(code),
            _ => code.wrapping_add(self.code_shift()),
        }
    }

    /// Returns the number that makes a canonical code of a published one of the same width, added
    /// to it as a byte.
    pub fn code_shift(&self) -> u8 {
        match (self.format.element, self.code()) {
            (CodeType::Uint(bits), WeightCode::Int8) => 0u8.wrapping_sub(1 << (bits - 1)),
            (CodeType::Uint(bits), WeightCode::Int4) => 8 - (1 << (bits - 1)),
            _ => 0,
        }
    }

    /// Returns the number that makes a canonical zero point of a published one, added to it.
    pub fn zero_shift(&self) -> i32 {
        match self.format.element {
            CodeType::Uint(bits @ 5..) => -(1 << (bits - 1)),
            _ => 0,
        }
    }
}

impl Blocks {
    /// Returns the canonical format that holds these blocks exactly.
    pub fn stored(&self) -> WeightFormat {
        let two_levels = self.scale == ScaleType::Int8;
        let offset = if two_levels {
            OffsetType::Int8
        } else {
            OffsetType::F16
        };
        WeightFormat {
            code: self.code,
            block: [1, self.group],
            scale: self.scale,
            second: two_levels.then_some(self.elements),
            offset: self.offset.then_some(offset),
            ..UNNAMED
        }
        .recognised()
    }

    /// Returns the scales and offsets of one block of [`Blocks::bytes`] bytes, as canonical codes
    /// need them.
    pub fn stored_scales(&self, block: &[u8]) -> BlockScales {
        let mut parts = self.scales(block);
        let doubled = self.doubled();
        parts.scales.iter_mut().for_each(|scale| *scale *= doubled);
        parts
    }

    /// Returns the factor of the numbers of codes here over those of canonical codes.
    fn doubled(&self) -> f32 {
        match self.code {
            WeightCode::E2m1 => 2.0,
            _ => 1.0,
        }
    }

    /// Returns the canonical code of each integer that [`Blocks::codes`] unpacks, by its byte in
    /// two's complement.
    pub fn stored_codes(&self) -> [u8; 256] {
        let mut codes = [0; 256];
        // Downwards, so that a zero has the code of the positive one.
        for code in (0..1u16 << self.code.bits()).rev() {
            let number = self.code.value(code as u8) * self.doubled();
            codes[usize::from(number as i8 as u8)] = code as u8;
        }
        codes
    }
}

/// The canonical tensors of one matrix, in borrowed bytes. The constructor of this struct must have
/// checked that each has the length that [`WeightFormat::tensors`] says.
#[derive(Clone, Copy, Debug)]
pub struct StoredMatrix<'a> {
    /// The format.
    pub format: WeightFormat,
    /// Rows and columns, counted in numbers.
    pub size: [usize; 2],
    /// The codes, of `.weight`.
    pub codes: &'a [u8],
    /// The scales, of `.scale`.
    pub scales: &'a [u8],
    /// The factors of scales, of `.scale_2`; empty if the format has none.
    pub scales_2: &'a [u8],
    /// The offsets, of `.offset`; empty if the format has none.
    pub offsets: &'a [u8],
    /// The factors of offsets, of `.offset_2`; empty if the format has none.
    pub offsets_2: &'a [u8],
}

/// The numbers that the codes of one block have in common.
#[derive(Clone, Copy)]
struct BlockNumbers {
    scale: f32,
    /// Subtracted from the number of a code.
    zero: f32,
    /// Subtracted from the product of the two.
    offset: f32,
}

impl StoredMatrix<'_> {
    /// Decodes a row into as many values as the matrix has columns. Each product and each
    /// difference is rounded to f32.
    pub fn row(&self, row: usize, values: &mut [f32]) {
        let (code, columns) = (self.format.code, self.size[1]);
        let (bits, words) = (code.bits(), self.format.row_words(columns));
        let codes = &self.codes[row * words * 4..];
        let mask = ((1u32 << bits) - 1) as u8;
        let subtracts = matches!(self.format.offset, Some(OffsetType::F16 | OffsetType::Int8));
        let width = self.format.block_columns(columns);
        for (block, values) in values.chunks_mut(width).enumerate() {
            let numbers = self.block(row, block);
            for (value, column) in values.iter_mut().zip(block * width..) {
                let bit = column * bits;
                let number = code.value(codes[bit / 8] >> (bit % 8) & mask);
                *value = (number - numbers.zero) * numbers.scale;
                if subtracts {
                    *value -= numbers.offset;
                }
            }
        }
    }

    fn block(&self, row: usize, block: usize) -> BlockNumbers {
        let format = &self.format;
        let [_, across] = format.scale_shape(self.size);
        let (line, byte) = (row / format.block[0], across.next_multiple_of(4));
        let at = |bytes: bool| line * if bytes { byte } else { across } + block;
        let scale = format
            .scale
            .read(self.scales, at(format.scale.dtype().is_none()));
        let second = |factors: &[u8]| {
            let Some([_, across]) = format.second_shape(self.size) else {
                return 1.0;
            };
            let column = block * format.block_columns(self.size[1]);
            let block = column.checked_div(format.second.unwrap_or(0)).unwrap_or(0);
            ScaleType::F32.read(factors, row * across + block)
        };
        let int = || ScaleType::Int8.read(self.offsets, at(true));
        let (zero, offset) = match format.offset {
            None => (0.0, 0.0),
            Some(OffsetType::Zero) => (int(), 0.0),
            Some(OffsetType::F16) => (0.0, ScaleType::F16.read(self.offsets, at(false))),
            Some(OffsetType::Int8) => (0.0, int() * second(self.offsets_2)),
        };
        BlockNumbers {
            scale: scale * second(self.scales_2),
            zero,
            offset,
        }
    }
}
