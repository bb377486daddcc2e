//! GGUF's block formats: codes and their scales side by side in one run of bytes.
//!
//! The layouts are those of ggml's `ggml-common.h`. A number is `scale * code` or
//! `scale * code - offset`, and each operation rounds to f32, as ggml's `dequantize_row_*` and
//! gguf-py compute it. In blocks of two levels the scale of a group is an integer times the factor
//! of the block, and its offset is another integer times another factor.

use super::ScaleType;
use super::code::{NONLINEAR, e8m0, f16};
use super::encode::EncodeError;
use super::encode_blocks as encode;
use crate::WeightCode;

/// Elements of the largest block.
pub const LARGEST: usize = 256;

/// A ggml type whose tensors are blocks of codes.
#[derive(Clone, Copy, Debug)]
pub struct Blocks {
    /// ggml's name for it.
    pub name: &'static str,
    /// ggml's number for it, as tensor infos carry it.
    pub id: u32,
    /// Elements of a block; a row is a whole number of blocks.
    pub elements: usize,
    /// Bytes of a block.
    pub bytes: usize,
    /// Elements that share one scale.
    pub group: usize,
    /// Whether each group subtracts an offset.
    pub offset: bool,
    /// The narrowest code that has all of its numbers. Those of E2M1 are doubled here, and scales
    /// halved, as ggml has them.
    pub code: WeightCode,
    /// The type of a group's scale; [`ScaleType::Int8`] in blocks of two levels.
    pub scale: ScaleType,
    codes: fn(&[u8], &mut [i8; LARGEST]),
    scales: fn(&[u8], &mut BlockScales),
    /// The encoder of one block; `None` for a type that is only read.
    pack: Option<encode::Pack>,
}

/// The scales and offsets of one block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockScales {
    /// The scale of each group.
    pub scales: [f32; 16],
    /// The factor of all scales: 1 in blocks of one level.
    pub scale_2: f32,
    /// The offset of each group, subtracted after scaling.
    pub offsets: [f32; 16],
    /// The factor of all offsets.
    pub offset_2: f32,
}

impl Default for BlockScales {
    fn default() -> BlockScales {
        BlockScales {
            scales: [0.0; 16],
            scale_2: 1.0,
            offsets: [0.0; 16],
            offset_2: 1.0,
        }
    }
}

impl PartialEq for Blocks {
    fn eq(&self, other: &Blocks) -> bool {
        self.id == other.id
    }
}

impl Eq for Blocks {}

macro_rules! blocks {
    ($($name:literal $id:literal: $elements:literal in $bytes:literal, groups of $group:literal, $offset:literal, $code:ident by $scale:ident, $codes:expr, $scales:ident, $pack:expr;)*) => {
        /// Every block type that moesaic reads.
        pub static BLOCKS: &[Blocks] = &[$(Blocks {
            name: $name,
            id: $id,
            elements: $elements,
            bytes: $bytes,
            group: $group,
            offset: $offset,
            code: WeightCode::$code,
            scale: ScaleType::$scale,
            codes: $codes,
            scales: $scales,
            pack: $pack,
        }),*];
    };
}

blocks! {
    "Q4_0" 2: 32 in 18, groups of 32, false, Int4 by F16, |b, c| halves(&b[2..], c, |n| n as i8 - 8), half_first, Some(encode::q4_0);
    "Q4_1" 3: 32 in 20, groups of 32, true, Uint4 by F16, |b, c| halves(&b[4..], c, |n| n as i8), half_and_offset, Some(encode::q4_1);
    "Q5_0" 6: 32 in 22, groups of 32, false, Int8 by F16, |b, c| five_bits(&b[2..], c, 16), half_first, Some(encode::q5_0);
    "Q5_1" 7: 32 in 24, groups of 32, true, Int8 by F16, |b, c| five_bits(&b[4..], c, 0), half_and_offset, Some(encode::q5_1);
    "Q8_0" 8: 32 in 34, groups of 32, false, Int8 by F16, |b, c| bytes(&b[2..], c), half_first, Some(encode::q8_0);
    "Q2_K" 10: 256 in 84, groups of 16, true, Uint4 by Int8, |b, c| pairs(&b[16..80], c), q2_k_scales, None;
    "Q3_K" 11: 256 in 110, groups of 16, false, Int4 by Int8, q3_k, q3_k_scales, None;
    "Q4_K" 12: 256 in 144, groups of 32, true, Uint4 by Int8, |b, c| groups_of_halves(&b[16..], c), scales_of_six_bits, Some(encode::q4_k);
    "Q5_K" 13: 256 in 176, groups of 32, true, Int8 by Int8, q5_k, scales_of_six_bits, Some(encode::q5_k);
    "Q6_K" 14: 256 in 210, groups of 16, false, Int8 by Int8, q6_k, q6_k_scales, Some(encode::q6_k);
    "IQ4_NL" 20: 32 in 18, groups of 32, false, Iq4nl by F16, |b, c| halves(&b[2..], c, nonlinear), half_first, Some(encode::iq4_nl);
    "IQ4_XS" 23: 256 in 136, groups of 32, false, Iq4nl by Int8, iq4_xs, iq4_xs_scales, None;
    "MXFP4" 39: 32 in 17, groups of 32, false, E2m1 by E8m0, |b, c| halves(&b[1..], c, doubled), half_of_e8m0, Some(encode::mxfp4);
}

impl Blocks {
    /// Returns the type with ggml's number, if it is read.
    pub fn of(id: u32) -> Option<&'static Blocks> {
        BLOCKS.iter().find(|blocks| blocks.id == id)
    }

    /// Unpacks the codes of one block of [`Blocks::bytes`] bytes, in the order of the row.
    pub fn codes(&self, block: &[u8], into: &mut [i8; LARGEST]) {
        (self.codes)(&block[..self.bytes], into);
    }

    /// Unpacks the scales and offsets of one block of [`Blocks::bytes`] bytes.
    pub fn scales(&self, block: &[u8]) -> BlockScales {
        let mut scales = BlockScales::default();
        (self.scales)(&block[..self.bytes], &mut scales);
        scales
    }

    /// Decodes one block of [`Blocks::bytes`] bytes into [`Blocks::elements`] values.
    pub fn decode(&self, block: &[u8], values: &mut [f32]) {
        let mut codes = [0; LARGEST];
        self.codes(block, &mut codes);
        let parts = self.scales(block);
        let groups = values[..self.elements].chunks_exact_mut(self.group);
        let codes = codes.chunks_exact(self.group);
        let scales = parts.scales.iter().zip(&parts.offsets);
        for ((values, codes), (scale, offset)) in groups.zip(codes).zip(scales) {
            let (scale, offset) = (scale * parts.scale_2, offset * parts.offset_2);
            for (value, code) in values.iter_mut().zip(codes) {
                *value = scale * f32::from(*code);
                if self.offset {
                    *value -= offset;
                }
            }
        }
    }
}

impl Blocks {
    /// Returns true if [`Blocks::encode`] makes such blocks.
    pub fn can_encode(&self) -> bool {
        self.pack.is_some()
    }

    /// Encodes rows of `columns` elements, a whole number of blocks each, by round to nearest at
    /// the scales of each block's extreme elements.
    ///
    /// # Errors
    ///
    /// [`EncodeError`] for an element that is NaN, infinite or too large, and for rows that are not
    /// whole blocks. A type that is only read has no multiple of columns that it takes.
    pub fn encode(&self, values: &[f32], columns: usize) -> Result<Vec<u8>, EncodeError> {
        let (Some(pack), true) = (self.pack, columns.is_multiple_of(self.elements)) else {
            return Err(EncodeError::Columns {
                format: self.name,
                columns,
                multiple: if self.can_encode() { self.elements } else { 0 },
            });
        };
        super::encode::check_finite(self.name, values, columns)?;
        let mut bytes = vec![0; values.len() / self.elements * self.bytes];
        let blocks = bytes.chunks_exact_mut(self.bytes);
        for (values, block) in values.chunks_exact(self.elements).zip(blocks) {
            pack(values, block).ok_or_else(|| EncodeError::TooLarge {
                format: self.name,
                value: values.iter().fold(0f32, |most, v| most.max(v.abs())),
            })?;
        }
        Ok(bytes)
    }
}

/// Reads the f16 at a byte offset.
fn half(block: &[u8], at: usize) -> f32 {
    f16(u16::from_le_bytes([block[at], block[at + 1]]))
}

fn half_first(block: &[u8], into: &mut BlockScales) {
    into.scales[0] = half(block, 0);
}

/// Reads a scale, and a number that blocks add, whose negative is the offset.
fn half_and_offset(block: &[u8], into: &mut BlockScales) {
    (into.scales[0], into.offsets[0]) = (half(block, 0), -half(block, 2));
}

/// Unpacks 4-bit codes from 16 bytes: all low nibbles come first.
fn halves(bytes: &[u8], codes: &mut [i8], of: impl Fn(u8) -> i8) {
    let (low, high) = codes[..32].split_at_mut(16);
    for ((byte, low), high) in bytes[..16].iter().zip(low).zip(high) {
        *low = of(byte & 15);
        *high = of(byte >> 4);
    }
}

/// Unpacks 5-bit codes: the fifth bits in a 32-bit word, which has that of code `i` at position
/// `i`, and then the others in halves.
fn five_bits(from: &[u8], codes: &mut [i8], less: i8) {
    halves(&from[4..], codes, |code| code as i8);
    for (at, code) in codes[..32].iter_mut().enumerate() {
        let bit = (from[at / 8] >> (at % 8)) & 1;
        *code += (bit << 4) as i8 - less;
    }
}

fn bytes(from: &[u8], codes: &mut [i8]) {
    let pairs = codes.iter_mut().zip(from);
    pairs.for_each(|(code, byte)| *code = *byte as i8);
}

/// Unpacks 2-bit codes: each of two runs of 32 bytes holds four rows of 32 codes.
fn pairs(bytes: &[u8], codes: &mut [i8; LARGEST]) {
    for (at, code) in codes.iter_mut().enumerate() {
        let (run, row, column) = (at / 128, at / 32 % 4, at % 32);
        *code = ((bytes[run * 32 + column] >> (row * 2)) & 3) as i8;
    }
}

fn q2_k_scales(block: &[u8], into: &mut BlockScales) {
    (into.scale_2, into.offset_2) = (half(block, 80), half(block, 82));
    for (group, byte) in block[..16].iter().enumerate() {
        into.scales[group] = f32::from(byte & 15);
        into.offsets[group] = f32::from(byte >> 4);
    }
}

fn q3_k_scales(block: &[u8], into: &mut BlockScales) {
    let scales = &block[96..108];
    into.scale_2 = half(block, 108);
    for group in 0..16 {
        let low = (scales[group % 8] >> (group / 8 * 4)) & 15;
        let high = (scales[8 + group % 4] >> (group / 4 * 2)) & 3;
        into.scales[group] = f32::from(low | (high << 4)) - 32.0;
    }
}

fn q3_k(block: &[u8], codes: &mut [i8; LARGEST]) {
    pairs(&block[32..96], codes);
    for (at, code) in codes.iter_mut().enumerate() {
        if (block[at % 32] >> (at / 32)) & 1 == 0 {
            *code -= 4;
        }
    }
}

/// Unpacks the scales and offsets of Q4_K and Q5_K, 6 bits each, from 12 bytes.
fn scales_of_six_bits(block: &[u8], into: &mut BlockScales) {
    let packed = &block[4..16];
    (into.scale_2, into.offset_2) = (half(block, 0), half(block, 2));
    for group in 0..8 {
        let (scale, offset) = match group {
            0..4 => (packed[group] & 63, packed[group + 4] & 63),
            _ => (
                (packed[group + 4] & 15) | ((packed[group - 4] >> 6) << 4),
                (packed[group + 4] >> 4) | ((packed[group] >> 6) << 4),
            ),
        };
        into.scales[group] = f32::from(scale);
        into.offsets[group] = f32::from(offset);
    }
}

/// Unpacks 4-bit codes: each run of 32 bytes holds one group in its low nibbles and the next in its
/// high nibbles.
fn groups_of_halves(bytes: &[u8], codes: &mut [i8; LARGEST]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
        let (low, high) = codes.split_at_mut(32);
        for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
            *low = (byte & 15) as i8;
            *high = (byte >> 4) as i8;
        }
    }
}

fn q5_k(block: &[u8], codes: &mut [i8; LARGEST]) {
    groups_of_halves(&block[48..], codes);
    for (at, code) in codes.iter_mut().enumerate() {
        *code += (((block[16 + at % 32] >> (at / 32)) & 1) << 4) as i8;
    }
}

fn q6_k_scales(block: &[u8], into: &mut BlockScales) {
    into.scale_2 = half(block, 208);
    for (group, scale) in block[192..208].iter().enumerate() {
        into.scales[group] = f32::from(*scale as i8);
    }
}

fn q6_k(block: &[u8], codes: &mut [i8; LARGEST]) {
    let (low, high) = (&block[..128], &block[128..192]);
    for (at, code) in codes.iter_mut().enumerate() {
        let (run, row, column) = (at / 128, at / 32 % 4, at % 32);
        let four = (low[run * 64 + row % 2 * 32 + column] >> (row / 2 * 4)) & 15;
        let two = (high[run * 32 + column] >> (row * 2)) & 3;
        *code = (four | (two << 4)) as i8 - 32;
    }
}

fn nonlinear(code: u8) -> i8 {
    NONLINEAR[usize::from(code)]
}

fn iq4_xs_scales(block: &[u8], into: &mut BlockScales) {
    let high = u16::from_le_bytes([block[2], block[3]]);
    into.scale_2 = half(block, 0);
    for group in 0..8 {
        let low = (block[4 + group / 2] >> (group % 2 * 4)) & 15;
        let scale = u16::from(low) | (((high >> (group * 2)) & 3) << 4);
        into.scales[group] = f32::from(scale) - 32.0;
    }
}

fn iq4_xs(block: &[u8], codes: &mut [i8; LARGEST]) {
    for (bytes, codes) in block[8..].chunks_exact(16).zip(codes.chunks_exact_mut(32)) {
        halves(bytes, codes, nonlinear);
    }
}

/// The values of E2M1, doubled: ggml halves the scale in return.
const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

fn doubled(code: u8) -> i8 {
    DOUBLED[usize::from(code)]
}

fn half_of_e8m0(block: &[u8], into: &mut BlockScales) {
    into.scales[0] = match block[0] {
        // OCP's E8M0 has NaN here, ggml a number.
        255 => e8m0(254),
        code => e8m0(code) / 2.0,
    };
}
