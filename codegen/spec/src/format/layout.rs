//! The order of codes, scales and zero points in a file, for writing; [`Matrices`] reads it.
//!
//! [`Matrices`]: super::Matrices

use super::matrices::PLACES;
use super::{CodeOrder, CodeType, Format, ScaleBlock, Zero};

/// Returns the rows and columns that share a scale.
pub fn block(format: &Format, [_, columns]: [usize; 2]) -> [usize; 2] {
    match format.block {
        ScaleBlock::Tile(block) => block,
        ScaleBlock::Row | ScaleBlock::MatrixOrRow => [1, columns.max(1)],
    }
}

/// Returns the rows and columns of a matrix's scales.
pub fn grid(format: &Format, size: [usize; 2]) -> [usize; 2] {
    let block = block(format, size);
    [size[0].div_ceil(block[0]), size[1].div_ceil(block[1])]
}

/// Returns the shape of the tensor of codes.
pub fn codes_shape(format: &Format, [rows, columns]: [usize; 2]) -> [usize; 2] {
    let bits = format.element.bits();
    match format.packing {
        CodeOrder::Rows { word } => [rows, (columns * bits).div_ceil(usize::from(word))],
        CodeOrder::Columns => [(columns * bits).div_ceil(32), rows],
        CodeOrder::Interleaved => [columns, rows / 8],
        CodeOrder::RowPairs => [rows / 2, columns],
    }
}

/// Returns the shape of the tensor of scales.
pub fn scales_shape(format: &Format, size: [usize; 2]) -> [usize; 2] {
    let [down, across] = grid(format, size);
    match format.packing {
        CodeOrder::Rows { .. } | CodeOrder::RowPairs => [down, across],
        CodeOrder::Columns | CodeOrder::Interleaved => [across, down],
    }
}

/// Returns the shape of the tensor of zero points.
pub fn zeros_shape(format: &Format, size: [usize; 2]) -> [usize; 2] {
    let [down, across] = grid(format, size);
    let words = (down * format.element.bits()).div_ceil(32);
    match format.packing {
        CodeOrder::Rows { .. } if format.element == CodeType::Int8 => [down, across],
        CodeOrder::Rows { .. } | CodeOrder::RowPairs => [words, across],
        CodeOrder::Columns | CodeOrder::Interleaved => [across, words],
    }
}

/// Returns the index of a block's scale.
pub(super) fn scale_index(format: &Format, grid: [usize; 2], [down, across]: [usize; 2]) -> usize {
    match format.packing {
        CodeOrder::Rows { .. } | CodeOrder::RowPairs => down * grid[1] + across,
        CodeOrder::Columns | CodeOrder::Interleaved => across * grid[0] + down,
    }
}

/// Packs a matrix of codes, one byte each, into the order of the format.
pub(super) fn pack(format: &Format, size: [usize; 2], codes: &[u8]) -> Vec<u8> {
    let ([rows, columns], bits) = (size, format.element.bits());
    match format.packing {
        CodeOrder::Rows { word: 8 } if bits == 8 => codes.to_vec(),
        CodeOrder::Rows { word } => {
            let width = (columns * bits).div_ceil(usize::from(word)) * usize::from(word) / 8;
            let mut packed = vec![0; rows * width];
            for (row, codes) in codes.chunks_exact(columns.max(1)).enumerate() {
                let line = &mut packed[row * width..(row + 1) * width];
                if bits == 4 {
                    for (byte, pair) in line.iter_mut().zip(codes.chunks(2)) {
                        *byte = pair[0] | pair.get(1).copied().unwrap_or(0) << 4;
                    }
                    continue;
                }
                for (column, code) in codes.iter().enumerate() {
                    let bit = column * bits;
                    let [low, high] = (u16::from(*code) << (bit % 8)).to_le_bytes();
                    line[bit / 8] |= low;
                    if high != 0 {
                        line[bit / 8 + 1] |= high;
                    }
                }
            }
            packed
        }
        CodeOrder::Columns => {
            let mut packed = Words::new((columns * bits).div_ceil(32) * rows);
            for (at, code) in codes.iter().enumerate() {
                let (row, bit) = (at / columns, at % columns * bits);
                packed.put(bit / 32 * rows + row, rows, bit % 32, *code);
            }
            packed.into_bytes()
        }
        CodeOrder::RowPairs => {
            let mut packed = vec![0; rows / 2 * columns];
            for (at, code) in codes.iter().enumerate() {
                let (row, column) = (at / columns, at % columns);
                packed[row / 2 * columns + column] |= code << (row % 2 * 4);
            }
            packed
        }
        CodeOrder::Interleaved => {
            let (across, mut packed) = (rows / 8, Words::new(columns * rows / 8));
            for (at, code) in codes.iter().enumerate() {
                let (row, column) = (at / columns, at % columns);
                let word = column * across + row / 8;
                packed.put(word, 0, PLACES[row % 8] * 4, *code);
            }
            packed.into_bytes()
        }
    }
}

/// Packs zero points, one byte each in the order of the grid, as the format stores them.
pub(super) fn pack_zeros(format: &Format, [down, across]: [usize; 2], zeros: &[u8]) -> Vec<u8> {
    if format.element == CodeType::Int8 {
        return zeros.to_vec();
    }
    let bits = format.element.bits();
    let words = (down * bits).div_ceil(32);
    let mut packed = Words::new(words * across);
    // A zero point of 0 wraps to all ones, which readers undo.
    let less = u8::from(format.zero == Zero::LessOne);
    let mask = ((1u32 << bits) - 1) as u8;
    for (at, zero) in zeros.iter().enumerate() {
        let (row, group) = (at / across, at % across);
        let (zero, bit) = (zero.wrapping_sub(less) & mask, row * bits);
        match format.packing {
            CodeOrder::Rows { .. } | CodeOrder::RowPairs => {
                packed.put(bit / 32 * across + group, across, bit % 32, zero);
            }
            CodeOrder::Columns => packed.put(group * words + bit / 32, 1, bit % 32, zero),
            CodeOrder::Interleaved => {
                packed.put(group * words + row / 8, 0, PLACES[row % 8] * 4, zero);
            }
        }
    }
    packed.into_bytes()
}

/// Words of 32 bits.
struct Words(Vec<u32>);

impl Words {
    fn new(count: usize) -> Words {
        Words(vec![0; count])
    }

    /// Puts a code at a bit of a word. What does not fit goes to the word `next` words further.
    fn put(&mut self, word: usize, next: usize, bit: usize, code: u8) {
        let wide = u64::from(code) << bit;
        self.0[word] |= wide as u32;
        if wide >> 32 != 0 {
            self.0[word + next] |= (wide >> 32) as u32;
        }
    }

    /// Returns the words in little-endian bytes.
    fn into_bytes(self) -> Vec<u8> {
        self.0.into_iter().flat_map(u32::to_le_bytes).collect()
    }
}
