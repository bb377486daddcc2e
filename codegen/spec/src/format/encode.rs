//! The encoder of formats that keep codes and scales in separate tensors: round to nearest.
//!
//! Each block of a matrix gets the scale of its largest element, rounded to the type of scales, and
//! then every element the code nearest to its quotient by that rounded scale (ties to even).
//! Scales and quotients are f32 before they are rounded, as in other libraries, so that codes equal
//! theirs:
//!
//! - float codes: the largest magnitude over the largest code's value (448, 57344, 7.5, 6);
//! - float codes with E8M0 scales: 2 to the exponent of the largest magnitude, less the exponent of
//!   the largest code's value (OCP MX); larger elements saturate;
//! - symmetric integers: the largest magnitude over half of the range, 2 / (2^bits - 1);
//! - integers with zero points: the distance from the least to the largest element, zero among
//!   them, over 2^bits - 1; the zero point is the code nearest to zero.
//!
//! A second scale makes the largest magnitude of the matrix the largest scale times the largest
//! code: 448 * 6 for NVFP4. A block of zeros has scale 1. A scale that would round to zero is the
//! least positive one.

use super::code::{self, SmallFloat};
use super::{CodeOrder, CodeType, Format, Matrices, ScaleBlock, ScaleType, Scales, Second, Zero};
use super::{Zeros, layout};
use std::ops::Range;
use thiserror::Error;

/// The parts of an encoded matrix, in little-endian bytes and the order of the format.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Encoded {
    /// The codes.
    pub codes: Vec<u8>,
    /// One scale per block.
    pub scales: Vec<u8>,
    /// The second scale, if the format has one.
    pub second: Option<f32>,
    /// One zero point per block, if the format or the options ask for them.
    pub zeros: Option<Vec<u8>>,
}

/// Choices that a format leaves to the encoder.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EncodeOptions {
    /// Whether integers get zero points that fit each block. Without it the zero point is half of
    /// the range, stored where the format demands one.
    pub zero_points: bool,
    /// The second scale. Without it [`Format::second_scale`] of the matrix's largest magnitude.
    pub second: Option<f32>,
}

/// The reason a matrix cannot be encoded.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// An element is NaN or infinite, for which no code stands at any scale.
    #[error("row {row}, column {column} is {value}, which {format} does not encode")]
    NotFinite {
        /// The format.
        format: &'static str,
        /// The row of the element.
        row: usize,
        /// Its column.
        column: usize,
        /// The element.
        value: f32,
    },

    /// An element is so large that no scale of the format reaches it.
    #[error("elements of magnitude {value:e} exceed what scales of {format} can reach")]
    TooLarge {
        /// The format.
        format: &'static str,
        /// The magnitude.
        value: f32,
    },

    /// The width is no multiple of the block.
    #[error("{format} needs a multiple of {multiple} columns, these are {columns}")]
    Columns {
        /// The format.
        format: &'static str,
        /// The number of columns.
        columns: usize,
        /// The factor.
        multiple: usize,
    },

    /// The height does not fill whole words.
    #[error("{format} needs a multiple of {multiple} rows, these are {rows}")]
    Rows {
        /// The format.
        format: &'static str,
        /// The number of rows.
        rows: usize,
        /// The factor.
        multiple: usize,
    },
}

/// The least and the largest element of a block.
#[derive(Clone, Copy, Default)]
pub(super) struct Extent {
    pub least: f32,
    pub largest: f32,
}

impl Extent {
    /// Returns the extent of finite elements, zero among them.
    pub fn of(values: &[f32]) -> Extent {
        Extent::default().with(values)
    }

    /// Adds elements. Several extents grow side by side, as vector instructions have it.
    fn with(self, values: &[f32]) -> Extent {
        const LANES: usize = 16;
        let (mut least, mut largest) = ([self.least; LANES], [self.largest; LANES]);
        let rest = values.chunks_exact(LANES).remainder();
        for values in values.chunks_exact(LANES).chain([rest]) {
            for (value, (least, largest)) in values.iter().zip(least.iter_mut().zip(&mut largest)) {
                *least = if *value < *least { *value } else { *least };
                *largest = if *value > *largest { *value } else { *largest };
            }
        }
        Extent {
            least: least.into_iter().fold(0.0, f32::min),
            largest: largest.into_iter().fold(0.0, f32::max),
        }
    }

    pub fn magnitude(self) -> f32 {
        self.largest.max(-self.least)
    }
}

/// The scale and zero point of one block.
struct Block {
    /// The bits of the stored scale.
    bits: u32,
    /// The scale of codes, the second one included.
    scale: f32,
    zero: u8,
}

impl ScaleType {
    /// Returns the type as a float, unless it is a power of two.
    fn float(self) -> Option<SmallFloat> {
        match self {
            ScaleType::F16 => Some(code::F16),
            ScaleType::Bf16 => Some(code::BF16),
            ScaleType::E4m3 => Some(code::FLOAT_E4M3),
            ScaleType::F32 | ScaleType::E8m0 | ScaleType::Int8 => None,
        }
    }

    /// Returns the bits of the nearest positive scale, or `None` above the largest.
    fn nearest(self, scale: f64) -> Option<u32> {
        match self.float() {
            Some(float) if scale > float.largest => None,
            Some(float) => Some(float.nearest(scale).max(1)),
            None => {
                let narrow = scale as f32;
                narrow.is_finite().then(|| narrow.to_bits().max(1))
            }
        }
    }

    fn put(self, bits: u32, bytes: &mut [u8]) {
        bytes.copy_from_slice(&bits.to_le_bytes()[..self.size()]);
    }
}

impl CodeType {
    /// Returns the float that a code is, unless it is an integer.
    fn float(self) -> Option<SmallFloat> {
        match self {
            CodeType::E4m3 => Some(code::FLOAT_E4M3),
            CodeType::E5m2 => Some(code::FLOAT_E5M2),
            CodeType::E2m3 => Some(code::FLOAT_E2M3),
            CodeType::E2m1 => Some(code::FLOAT_E2M1),
            CodeType::Int8 | CodeType::Uint(_) => None,
        }
    }

    /// Returns the largest magnitude of a code's value.
    fn largest(self) -> f64 {
        let half = f64::from(1u32 << (self.bits() - 1));
        self.float().map_or(half, |float| float.largest)
    }
}

impl Format {
    /// Returns the second scale of matrices whose largest magnitude is this, if the format has one.
    /// Matrices that a kernel multiplies as one, such as gate and up, should share it.
    pub fn second_scale(&self, magnitude: f32) -> Option<f32> {
        let second = self.second?;
        let most = self.element.largest() * self.scale.float().map_or(1.0, |float| float.largest);
        if magnitude == 0.0 {
            return Some(1.0);
        }
        let scale = match second {
            Second::Times => f64::from(magnitude) / most,
            Second::Divided => most / f64::from(magnitude),
        };
        Some((scale as f32).clamp(f32::MIN_POSITIVE, f32::MAX))
    }

    /// Encodes the matrix `values` of `size` rows and columns.
    ///
    /// # Errors
    ///
    /// [`EncodeError`] for an element that is NaN or infinite or too large, and for sizes that the
    /// format does not allow.
    pub fn encode(
        &self,
        values: &[f32],
        size: [usize; 2],
        options: EncodeOptions,
    ) -> Result<Encoded, EncodeError> {
        self.check_size(size)?;
        check_finite(self.name, values, size[1])?;
        let own = || self.second_scale(Extent::of(values).magnitude());
        let mut encoder = Encoder {
            format: self,
            size,
            values,
            zero_points: options.zero_points && self.zero != Zero::None,
            second: self.second.and(options.second).or_else(own),
            codes: vec![0; values.len()],
        };
        let grid = layout::grid(self, size);
        let mut scales = vec![0; grid[0] * grid[1] * self.scale.size()];
        let mut zeros = vec![0; grid[0] * grid[1]];
        for down in 0..grid[0] {
            for across in 0..grid[1] {
                let block = encoder.block([down, across])?;
                let at = layout::scale_index(self, grid, [down, across]) * self.scale.size();
                let bytes = &mut scales[at..at + self.scale.size()];
                self.scale.put(block.bits, bytes);
                zeros[down * grid[1] + across] = block.zero;
            }
        }
        let stored = matches!(self.zero, Zero::Stored | Zero::LessOne) || encoder.zero_points;
        Ok(Encoded {
            codes: layout::pack(self, size, &encoder.codes),
            scales,
            second: encoder.second,
            zeros: stored.then(|| layout::pack_zeros(self, grid, &zeros)),
        })
    }

    /// Refuses sizes that the format does not allow.
    ///
    /// # Errors
    ///
    /// [`EncodeError::Columns`] or [`EncodeError::Rows`].
    pub fn check_size(&self, [rows, columns]: [usize; 2]) -> Result<(), EncodeError> {
        let (format, bits) = (self.name, self.element.bits());
        let block = match self.block {
            // Only blocks of several rows may be cut off at the edges.
            ScaleBlock::Tile([1, columns]) => columns,
            _ => 1,
        };
        let word = match self.packing {
            // Four codes of six bits fill three bytes.
            CodeOrder::Rows { word: 8 } if bits == 6 => 4,
            CodeOrder::Rows { word: 8 } => 8 / bits,
            CodeOrder::Columns => 32 / bits,
            CodeOrder::Rows { .. } | CodeOrder::Interleaved | CodeOrder::RowPairs => 1,
        };
        let multiple = if block.is_multiple_of(word) {
            block
        } else {
            block * word
        };
        if !columns.is_multiple_of(multiple) {
            return Err(EncodeError::Columns {
                format,
                columns,
                multiple,
            });
        }
        let multiple = match self.packing {
            CodeOrder::Rows { .. } => 1,
            // Blocks of rows, of an even number.
            CodeOrder::RowPairs => layout::block(self, [rows, columns])[0],
            CodeOrder::Columns | CodeOrder::Interleaved => 32 / bits,
        };
        if !rows.is_multiple_of(multiple) {
            return Err(EncodeError::Rows {
                format,
                rows,
                multiple,
            });
        }
        Ok(())
    }

    /// Returns the decoder of an encoded matrix.
    pub fn decoder<'a>(&self, encoded: &'a Encoded, size: [usize; 2]) -> Matrices<'a> {
        Matrices {
            format: *self,
            size,
            codes: &encoded.codes,
            scales: Scales {
                kind: self.scale,
                bytes: &encoded.scales,
                block: layout::block(self, size),
                grid: Some(layout::grid(self, size)),
                second: encoded.second.into_iter().collect(),
            },
            zeros: encoded.zeros.as_deref().map(|bytes| Zeros { bytes }),
            groups: None,
        }
    }
}

/// A matrix on its way to codes, one byte for each until they are packed.
struct Encoder<'a> {
    format: &'a Format,
    size: [usize; 2],
    values: &'a [f32],
    zero_points: bool,
    second: Option<f32>,
    codes: Vec<u8>,
}

impl Encoder<'_> {
    /// Encodes one block of the grid.
    fn block(&mut self, [down, across]: [usize; 2]) -> Result<Block, EncodeError> {
        let ([rows, columns], block) = (self.size, layout::block(self.format, self.size));
        let part = |at: usize, size: usize, all: usize| at * size..all.min((at + 1) * size);
        let (lines, width) = (part(down, block[0], rows), part(across, block[1], columns));
        let span = |row: usize| row * columns + width.start..row * columns + width.end;
        let rows = lines.clone().map(|row| &self.values[span(row)]);
        let extent = rows.fold(Extent::default(), Extent::with);
        let block = self.scaled(extent)?;
        lines.for_each(|row| self.codes_of(span(row), &block));
        Ok(block)
    }

    /// Chooses the scale and the zero point of a block.
    fn scaled(&self, extent: Extent) -> Result<Block, EncodeError> {
        let Format { element, scale, .. } = *self.format;
        let (magnitude, steps) = (
            f64::from(extent.magnitude()),
            ((1u32 << element.bits()) - 1) as f64,
        );
        let too_large = || EncodeError::TooLarge {
            format: self.format.name,
            value: extent.magnitude(),
        };
        let wanted = match element.float() {
            _ if magnitude == 0.0 => 1.0,
            Some(float) => magnitude / float.largest,
            None if self.zero_points => {
                (f64::from(extent.largest) - f64::from(extent.least)) / steps
            }
            None => magnitude * 2.0 / steps,
        };
        let bits = match scale {
            ScaleType::E8m0 if magnitude > 0.0 => {
                let exponent = code::exponent(magnitude) - code::exponent(element.largest());
                (exponent + 127).clamp(0, 254) as u32
            }
            ScaleType::E8m0 => 127,
            _ => {
                let stored = self.stored_scale(wanted as f32);
                scale.nearest(stored).ok_or_else(too_large)?
            }
        };
        let stored = scale.read(&bits.to_le_bytes(), 0);
        let scale = match self.format.second.zip(self.second) {
            None => stored,
            Some((Second::Times, second)) => stored * second,
            Some((Second::Divided, second)) => stored / second,
        };
        let zero = match self.format.zero {
            Zero::None => 0,
            _ if self.zero_points => {
                let zero = -f64::from(extent.least) / f64::from(scale);
                zero.round_ties_even().clamp(0.0, steps) as u8
            }
            _ => 1 << (element.bits() - 1),
        };
        // Zero points move the ends of the range, to at most all of it on one side.
        let most = if self.zero_points {
            f64::from(zero).max(steps - f64::from(zero))
        } else {
            element.largest()
        };
        if (scale * most as f32).is_finite() {
            Ok(Block { bits, scale, zero })
        } else {
            Err(too_large())
        }
    }

    /// Returns the scale that remains to be stored beside the second one, in the f32 of other
    /// libraries.
    fn stored_scale(&self, wanted: f32) -> f64 {
        let stored = match self.format.second.zip(self.second) {
            None => return f64::from(wanted),
            Some((Second::Times, second)) => wanted / second,
            Some((Second::Divided, second)) => wanted * second,
        };
        // The second scale is rounded, so the largest block may ask for a little too much.
        let most = self.format.scale.float().map_or(f64::MAX, |f| f.largest);
        f64::from(stored).min(most)
    }

    /// Encodes elements that share a scale.
    fn codes_of(&mut self, span: Range<usize>, block: &Block) {
        let (values, codes) = (&self.values[span.clone()], &mut self.codes[span]);
        let element = self.format.element;
        let most = (1 << element.bits()) - 1;
        // A loop for each type has the type's numbers as constants.
        match element {
            CodeType::E4m3 => floats(values, codes, block.scale, code::FLOAT_E4M3, 8),
            CodeType::E5m2 => floats(values, codes, block.scale, code::FLOAT_E5M2, 8),
            CodeType::E2m3 => floats(values, codes, block.scale, code::FLOAT_E2M3, 6),
            CodeType::E2m1 => floats(values, codes, block.scale, code::FLOAT_E2M1, 4),
            CodeType::Int8 => integers(values, codes, block, [-128, 127]),
            CodeType::Uint(_) => integers(values, codes, block, [0, most]),
        }
    }
}

/// Encodes numbers as floats. The quotient is that of f32, as other libraries compute it: ties are
/// then theirs.
#[inline(always)]
fn floats(values: &[f32], codes: &mut [u8], scale: f32, float: SmallFloat, bits: usize) {
    for (value, code) in values.iter().zip(codes) {
        *code = float.signed(*value / scale, bits);
    }
}

/// Encodes numbers as integers, by quotients of f32.
fn integers(values: &[f32], codes: &mut [u8], block: &Block, [least, most]: [i32; 2]) {
    // The last bit of the sum counts ones, and the bounds are farther from zero than any code.
    const LARGE: f32 = 12_582_912.0; // 1.5 * 2^23
    let (scale, zero) = (block.scale, i32::from(block.zero));
    for (value, code) in values.iter().zip(codes) {
        let steps = (*value / scale).clamp(-512.0, 512.0) + LARGE;
        let number = steps.to_bits().wrapping_sub(LARGE.to_bits()) as i32 + zero;
        *code = number.clamp(least, most) as u8;
    }
}

/// Refuses elements that are NaN or infinite.
pub(super) fn check_finite(
    format: &'static str,
    values: &[f32],
    columns: usize,
) -> Result<(), EncodeError> {
    // In parts, because a search that may end at any element is slow.
    let odd = |part: &[f32]| {
        part.iter()
            .fold(false, |odd, value| odd | !value.is_finite())
    };
    if !values.chunks(256).any(odd) {
        return Ok(());
    }
    let at = values.iter().position(|value| !value.is_finite());
    at.map_or(Ok(()), |at| {
        Err(EncodeError::NotFinite {
            format,
            row: at / columns,
            column: at % columns,
            value: values[at],
        })
    })
}
