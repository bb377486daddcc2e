//! GGUF's block formats: codes and their scales side by side in one run of bytes.
//!
//! The layouts are those of ggml's `ggml-common.h`. A number is `scale * code` or
//! `scale * code + offset`, and each operation rounds to f32, as ggml's `dequantize_row_*` and
//! gguf-py compute it.

use super::code::f16;
use super::encode::EncodeError;
use super::encode_blocks as encode;

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
    /// Whether each group adds an offset.
    pub offset: bool,
    unpack: fn(&[u8], &mut Unpacked),
    /// The encoder of one block; `None` for a type that is only read.
    pack: Option<encode::Pack>,
}

/// The codes of one block, with the scale and offset of each group.
#[derive(Clone, Debug)]
pub struct Unpacked {
    /// Integers, in the order of the row.
    pub codes: [i8; LARGEST],
    /// The scale of each group.
    pub scales: [f32; 16],
    /// The offset of each group, added after scaling.
    pub offsets: [f32; 16],
}

impl Default for Unpacked {
    fn default() -> Unpacked {
        Unpacked {
            codes: [0; LARGEST],
            scales: [0.0; 16],
            offsets: [0.0; 16],
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
    ($($name:literal $id:literal: $elements:literal in $bytes:literal, groups of $group:literal, $offset:literal, $unpack:expr, $pack:expr;)*) => {
        /// Every block type that moesaic reads.
        pub static BLOCKS: &[Blocks] = &[$(Blocks {
            name: $name,
            id: $id,
            elements: $elements,
            bytes: $bytes,
            group: $group,
            offset: $offset,
            unpack: $unpack,
            pack: $pack,
        }),*];
    };
}

blocks! {
    "Q4_0" 2: 32 in 18, groups of 32, false, q4_0, Some(encode::q4_0);
    "Q4_1" 3: 32 in 20, groups of 32, true, q4_1, Some(encode::q4_1);
    "Q5_0" 6: 32 in 22, groups of 32, false, q5_0, Some(encode::q5_0);
    "Q5_1" 7: 32 in 24, groups of 32, true, q5_1, Some(encode::q5_1);
    "Q8_0" 8: 32 in 34, groups of 32, false, q8_0, Some(encode::q8_0);
    "Q2_K" 10: 256 in 84, groups of 16, true, q2_k, None;
    "Q3_K" 11: 256 in 110, groups of 16, false, q3_k, None;
    "Q4_K" 12: 256 in 144, groups of 32, true, q4_k, Some(encode::q4_k);
    "Q5_K" 13: 256 in 176, groups of 32, true, q5_k, Some(encode::q5_k);
    "Q6_K" 14: 256 in 210, groups of 16, false, q6_k, Some(encode::q6_k);
    "IQ4_NL" 20: 32 in 18, groups of 32, false, iq4_nl, Some(encode::iq4_nl);
    "IQ4_XS" 23: 256 in 136, groups of 32, false, iq4_xs, None;
    "MXFP4" 39: 32 in 17, groups of 32, false, mxfp4, Some(encode::mxfp4);
}

impl Blocks {
    /// Returns the type with ggml's number, if it is read.
    pub fn of(id: u32) -> Option<&'static Blocks> {
        BLOCKS.iter().find(|blocks| blocks.id == id)
    }

    /// Unpacks one block of [`Blocks::bytes`] bytes.
    pub fn unpack(&self, block: &[u8], into: &mut Unpacked) {
        (self.unpack)(&block[..self.bytes], into);
    }

    /// Decodes one block of [`Blocks::bytes`] bytes into [`Blocks::elements`] values.
    pub fn decode(&self, block: &[u8], values: &mut [f32]) {
        let mut parts = Unpacked::default();
        self.unpack(block, &mut parts);
        let groups = values[..self.elements].chunks_exact_mut(self.group);
        let codes = parts.codes.chunks_exact(self.group);
        let scales = parts.scales.iter().zip(&parts.offsets);
        for ((values, codes), (scale, offset)) in groups.zip(codes).zip(scales) {
            for (value, code) in values.iter_mut().zip(codes) {
                *value = scale * f32::from(*code);
                // Adding a zero offset would turn a negative zero into a positive one.
                if self.offset {
                    *value += offset;
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

/// Unpacks 4-bit codes from 16 bytes: all low nibbles come first.
fn halves(bytes: &[u8], codes: &mut [i8], of: impl Fn(u8) -> i8) {
    for (at, byte) in bytes[..16].iter().enumerate() {
        codes[at] = of(byte & 15);
        codes[at + 16] = of(byte >> 4);
    }
}

/// Adds the fifth bit to 4-bit codes. Code `i` finds its bit at position `i` of a 32-bit word.
fn fifth(bytes: &[u8], codes: &mut [i8], less: i8) {
    for (at, code) in codes[..32].iter_mut().enumerate() {
        let bit = (bytes[at / 8] >> (at % 8)) & 1;
        *code += (bit << 4) as i8 - less;
    }
}

fn q4_0(block: &[u8], into: &mut Unpacked) {
    into.scales[0] = half(block, 0);
    halves(&block[2..], &mut into.codes, |code| code as i8 - 8);
}

fn q4_1(block: &[u8], into: &mut Unpacked) {
    (into.scales[0], into.offsets[0]) = (half(block, 0), half(block, 2));
    halves(&block[4..], &mut into.codes, |code| code as i8);
}

fn q5_0(block: &[u8], into: &mut Unpacked) {
    into.scales[0] = half(block, 0);
    halves(&block[6..], &mut into.codes, |code| code as i8);
    fifth(&block[2..], &mut into.codes, 16);
}

fn q5_1(block: &[u8], into: &mut Unpacked) {
    (into.scales[0], into.offsets[0]) = (half(block, 0), half(block, 2));
    halves(&block[8..], &mut into.codes, |code| code as i8);
    fifth(&block[4..], &mut into.codes, 0);
}

fn q8_0(block: &[u8], into: &mut Unpacked) {
    into.scales[0] = half(block, 0);
    let pairs = into.codes.iter_mut().zip(&block[2..]);
    pairs.for_each(|(code, byte)| *code = *byte as i8);
}

/// Unpacks 2-bit codes: each of two runs of 32 bytes holds four rows of 32 codes.
fn pairs(bytes: &[u8], codes: &mut [i8; LARGEST]) {
    for (at, code) in codes.iter_mut().enumerate() {
        let (run, row, column) = (at / 128, at / 32 % 4, at % 32);
        *code = ((bytes[run * 32 + column] >> (row * 2)) & 3) as i8;
    }
}

fn q2_k(block: &[u8], into: &mut Unpacked) {
    let (d, least) = (half(block, 80), half(block, 82));
    for (group, byte) in block[..16].iter().enumerate() {
        into.scales[group] = d * f32::from(byte & 15);
        into.offsets[group] = -(least * f32::from(byte >> 4));
    }
    pairs(&block[16..80], &mut into.codes);
}

fn q3_k(block: &[u8], into: &mut Unpacked) {
    let (masks, scales, d) = (&block[..32], &block[96..108], half(block, 108));
    for group in 0..16 {
        let low = (scales[group % 8] >> (group / 8 * 4)) & 15;
        let high = (scales[8 + group % 4] >> (group / 4 * 2)) & 3;
        into.scales[group] = d * (f32::from(low | (high << 4)) - 32.0);
    }
    pairs(&block[32..96], &mut into.codes);
    for (at, code) in into.codes.iter_mut().enumerate() {
        if (masks[at % 32] >> (at / 32)) & 1 == 0 {
            *code -= 4;
        }
    }
}

/// Unpacks the scales and offsets of Q4_K and Q5_K, 6 bits each, from 12 bytes.
fn scales_of_six_bits(block: &[u8], into: &mut Unpacked) {
    let (d, least, packed) = (half(block, 0), half(block, 2), &block[4..16]);
    for group in 0..8 {
        let (scale, offset) = match group {
            0..4 => (packed[group] & 63, packed[group + 4] & 63),
            _ => (
                (packed[group + 4] & 15) | ((packed[group - 4] >> 6) << 4),
                (packed[group + 4] >> 4) | ((packed[group] >> 6) << 4),
            ),
        };
        into.scales[group] = d * f32::from(scale);
        into.offsets[group] = -(least * f32::from(offset));
    }
}

/// Unpacks 4-bit codes: each run of 32 bytes holds one group in its low nibbles and the next in its
/// high nibbles.
fn groups_of_halves(bytes: &[u8], codes: &mut [i8; LARGEST]) {
    for (at, code) in codes.iter_mut().enumerate() {
        let (run, high, column) = (at / 64, at / 32 % 2, at % 32);
        *code = ((bytes[run * 32 + column] >> (high * 4)) & 15) as i8;
    }
}

fn q4_k(block: &[u8], into: &mut Unpacked) {
    scales_of_six_bits(block, into);
    groups_of_halves(&block[16..], &mut into.codes);
}

fn q5_k(block: &[u8], into: &mut Unpacked) {
    scales_of_six_bits(block, into);
    groups_of_halves(&block[48..], &mut into.codes);
    for (at, code) in into.codes.iter_mut().enumerate() {
        *code += (((block[16 + at % 32] >> (at / 32)) & 1) << 4) as i8;
    }
}

fn q6_k(block: &[u8], into: &mut Unpacked) {
    let (low, high, scales, d) = (
        &block[..128],
        &block[128..192],
        &block[192..208],
        half(block, 208),
    );
    for (group, scale) in scales.iter().enumerate() {
        into.scales[group] = d * f32::from(*scale as i8);
    }
    for (at, code) in into.codes.iter_mut().enumerate() {
        let (run, row, column) = (at / 128, at / 32 % 4, at % 32);
        let four = (low[run * 64 + row % 2 * 32 + column] >> (row / 2 * 4)) & 15;
        let two = (high[run * 32 + column] >> (row * 2)) & 3;
        *code = (four | (two << 4)) as i8 - 32;
    }
}

/// The values behind the codes of IQ4_NL and IQ4_XS.
pub(crate) const NONLINEAR: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

fn iq4_nl(block: &[u8], into: &mut Unpacked) {
    into.scales[0] = half(block, 0);
    halves(&block[2..], &mut into.codes, nonlinear);
}

fn nonlinear(code: u8) -> i8 {
    NONLINEAR[usize::from(code)]
}

fn iq4_xs(block: &[u8], into: &mut Unpacked) {
    let (d, high) = (half(block, 0), u16::from_le_bytes([block[2], block[3]]));
    for group in 0..8 {
        let low = (block[4 + group / 2] >> (group % 2 * 4)) & 15;
        let scale = u16::from(low) | (((high >> (group * 2)) & 3) << 4);
        into.scales[group] = d * (f32::from(scale) - 32.0);
        let codes = &mut into.codes[group * 32..];
        halves(&block[8 + group * 16..], codes, nonlinear);
    }
}

/// The values of E2M1, doubled: ggml halves the scale in return.
const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

fn mxfp4(block: &[u8], into: &mut Unpacked) {
    into.scales[0] = match block[0] {
        // These are subnormal f32 numbers, so the exponent field cannot hold the code.
        code @ 0..2 => f32::from_bits(0x0020_0000 << code),
        code => f32::from_bits((u32::from(code) - 1) << 23),
    };
    halves(&block[1..], &mut into.codes, |code| {
        DOUBLED[usize::from(code)]
    });
}
