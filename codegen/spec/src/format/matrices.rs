//! The decoder of formats that keep codes and scales in separate tensors.

use super::{CodeOrder, CodeType, Format, ScaleType, Second, Zero, code};

/// A stack of quantized matrices of one shape in borrowed bytes. The constructor of this struct
/// must have checked that each part has the length that the format demands.
#[derive(Clone, Debug)]
pub struct Matrices<'a> {
    /// The format.
    pub format: Format,
    /// Rows and columns of one matrix, counted in decoded numbers.
    pub size: [usize; 2],
    /// The codes.
    pub codes: &'a [u8],
    /// The scales of the codes.
    pub scales: Scales<'a>,
    /// The zero points. Without them the format's default applies.
    pub zeros: Option<Zeros<'a>>,
    /// The group of each column, as checked i32. Without it, groups are consecutive columns.
    pub groups: Option<&'a [u8]>,
}

/// The scales of matrices.
#[derive(Clone, Debug)]
pub struct Scales<'a> {
    /// The element type.
    pub kind: ScaleType,
    /// The scales in little-endian bytes.
    pub bytes: &'a [u8],
    /// Rows and columns of the block that shares one scale; both above zero.
    pub block: [usize; 2],
    /// Rows and columns of the scales of one matrix; `None` if all matrices share them.
    pub grid: Option<[usize; 2]>,
    /// The second scale: one per matrix, or one for all. Empty if the format has none.
    pub second: Vec<f32>,
}

/// Zero points, one per scale.
#[derive(Clone, Copy, Debug)]
pub struct Zeros<'a> {
    /// The zero points, packed as the format defines.
    pub bytes: &'a [u8],
}

/// The position of each of eight rows inside a 32-bit word of AWQ.
pub(super) const PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// One row of one matrix.
#[derive(Clone, Copy)]
struct Line {
    matrix: usize,
    row: usize,
}

impl Matrices<'_> {
    /// Decodes elements from index `first` on, counted row by row through all matrices. Returns
    /// their number: one run that shares a scale, at most the length of `values`.
    pub fn run(&self, first: usize, values: &mut [f32]) -> usize {
        let columns = self.size[1];
        let (line, column) = (self.line(first), first % columns);
        let (group, left) = self.group(column);
        // One run shares a scale, so it ends with the group, the row, or the buffer.
        let count = left.min(columns - column).min(values.len());
        let values = &mut values[..count];
        let scale = self.scale(line, group);
        match self.format.element {
            CodeType::E4m3 => self.floats(line, column, values, scale, &code::E4M3),
            CodeType::E5m2 => self.floats(line, column, values, scale, &code::E5M2),
            CodeType::E2m3 => self.floats(line, column, values, scale, &code::E2M3),
            CodeType::E2m1 => self.floats(line, column, values, scale, &code::E2M1),
            CodeType::Int8 => {
                let zero = self.zero(line, group);
                self.each(line, column, values, |code| {
                    (i32::from(code as i8) - zero) as f32 * scale
                });
            }
            CodeType::Uint(_) => {
                let zero = self.zero(line, group);
                self.each(line, column, values, |code| {
                    (i32::from(code) - zero) as f32 * scale
                });
            }
        }
        count
    }

    /// Returns a byte range of the codes that is sufficient for this range of elements.
    pub fn bytes(&self, elements: &std::ops::Range<usize>) -> std::ops::Range<usize> {
        match self.format.packing {
            CodeOrder::Rows { .. } => {
                let [_, columns] = self.size;
                let width = self.row_bytes();
                let end = elements.end.div_ceil(columns.max(1)) * width;
                elements.start / columns.max(1) * width..end.min(self.codes.len())
            }
            CodeOrder::RowPairs => {
                let numbers = (self.size[0] * self.size[1]).max(1);
                let end = elements.end.div_ceil(numbers) * numbers / 2;
                elements.start / numbers * numbers / 2..end.min(self.codes.len())
            }
            // A row's codes are spread over the words of the whole matrix.
            CodeOrder::Columns | CodeOrder::Interleaved => 0..self.codes.len(),
        }
    }

    /// Copies the codes of one row from the element at index `first` on, each into a byte.
    pub fn codes(&self, first: usize, codes: &mut [u8]) {
        self.each(self.line(first), first % self.size[1], codes, |code| code);
    }

    /// Returns the bytes of the row that begins with the element at index `first`, in formats whose
    /// rows are runs of bytes.
    pub fn row(&self, first: usize) -> Option<&[u8]> {
        let at = first / self.size[1] * self.row_bytes();
        let row = self.codes.get(at..at + self.row_bytes());
        row.filter(|_| matches!(self.format.packing, CodeOrder::Rows { .. }))
    }

    /// Returns 32-bit word `word` of the codes of the row that begins with the element at index
    /// `first`, in formats whose words hold consecutive codes of a row at a distance.
    pub fn column_word(&self, first: usize, word: usize) -> Option<u32> {
        let ([rows, columns], bits) = (self.size, self.format.element.bits());
        if self.format.packing != CodeOrder::Columns || 32 % bits != 0 {
            return None;
        }
        let line = self.line(first);
        let words = (columns * bits).div_ceil(32);
        Some(self.word((line.matrix * words + word) * rows + line.row))
    }

    /// Returns the bytes of the scale of the element at index `first`, without the second scale.
    pub fn scale_bytes(&self, first: usize) -> &[u8] {
        let size = self.scales.kind.size();
        let (group, _) = self.group(first % self.size[1]);
        let at = self.index(self.line(first), group) * size;
        &self.scales.bytes[at..at + size]
    }

    /// Returns the second scale of the element at index `first` as a factor, 1 if there is none.
    pub fn factor(&self, first: usize) -> f32 {
        match (self.format.second, self.second(self.line(first))) {
            (Some(Second::Times), Some(second)) => second,
            (Some(Second::Divided), Some(second)) => 1.0 / second,
            _ => 1.0,
        }
    }

    /// Returns the zero point of the element at index `first`.
    pub fn zero_point(&self, first: usize) -> i32 {
        let (group, _) = self.group(first % self.size[1]);
        self.zero(self.line(first), group)
    }

    /// Returns true if some zero point is another than the format's usual one.
    pub fn has_zero_points(&self) -> bool {
        let [rows, columns] = self.size;
        let [down, across] = self.scales.block;
        // Only single matrices have zero points.
        let rows = self.zeros.map_or(0, |_| rows);
        let usual = self.usual_zero();
        (0..rows).step_by(down).any(|row| {
            let line = Line { matrix: 0, row };
            (0..columns.div_ceil(across)).any(|group| self.zero(line, group) != usual)
        })
    }

    fn line(&self, first: usize) -> Line {
        let [rows, columns] = self.size;
        let line = first / columns;
        Line {
            matrix: line / rows,
            row: line % rows,
        }
    }

    fn row_bytes(&self) -> usize {
        match self.format.packing {
            CodeOrder::Rows { word } => {
                let word = usize::from(word);
                (self.size[1] * self.format.element.bits()).div_ceil(word) * word / 8
            }
            CodeOrder::Columns | CodeOrder::Interleaved | CodeOrder::RowPairs => 0,
        }
    }

    /// Returns the group of a column, and the number of columns from there on that share it.
    fn group(&self, column: usize) -> (usize, usize) {
        let width = self.scales.block[1];
        let Some(groups) = self.groups else {
            return (column / width, width - column % width);
        };
        let words = groups[column * 4..].chunks_exact(4);
        let mut words = words.map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let group = words.next().unwrap_or_default();
        let left = 1 + words.take_while(|other| *other == group).count();
        (group as usize, left)
    }

    /// Returns the index of a scale, which is also that of its zero point.
    fn index(&self, line: Line, group: usize) -> usize {
        let Some([down, across]) = self.scales.grid else {
            return 0;
        };
        let block = line.row / self.scales.block[0];
        let at = match self.format.packing {
            CodeOrder::Rows { .. } | CodeOrder::RowPairs => block * across + group,
            CodeOrder::Columns | CodeOrder::Interleaved => group * down + block,
        };
        line.matrix * down * across + at
    }

    fn scale(&self, line: Line, group: usize) -> f32 {
        let scales = &self.scales;
        let scale = scales.kind.read(scales.bytes, self.index(line, group));
        match (self.format.second, self.second(line)) {
            (Some(Second::Times), Some(second)) => scale * second,
            (Some(Second::Divided), Some(second)) => scale / second,
            _ => scale,
        }
    }

    fn second(&self, line: Line) -> Option<f32> {
        match self.scales.second.as_slice() {
            [] => None,
            [all] => Some(*all),
            each => Some(each[line.matrix]),
        }
    }

    fn floats(&self, line: Line, column: usize, values: &mut [f32], scale: f32, table: &[f32]) {
        self.each(line, column, values, |code| {
            table[usize::from(code)] * scale
        });
    }

    /// Decodes a row from `column` on by applying `number` to each code.
    fn each<T>(&self, line: Line, column: usize, values: &mut [T], number: impl Fn(u8) -> T) {
        let [rows, columns] = self.size;
        let bits = self.format.element.bits();
        let mask = (1u64 << bits) - 1;
        match self.format.packing {
            CodeOrder::Rows { .. } => {
                let at = (line.matrix * rows + line.row) * self.row_bytes();
                let row = &self.codes[at..at + self.row_bytes()];
                let values = values.iter_mut();
                match bits {
                    8 => values
                        .zip(&row[column..])
                        .for_each(|(v, c)| *v = number(*c)),
                    // Codes of these widths never straddle a byte.
                    1 | 2 | 4 => values.zip(column..).for_each(|(value, column)| {
                        let bit = column * bits;
                        *value = number(row[bit / 8] >> (bit % 8) & mask as u8);
                    }),
                    _ => values.zip(column..).for_each(|(value, column)| {
                        let bit = column * bits;
                        let next = row.get(bit / 8 + 1).copied().unwrap_or(0);
                        let both = u16::from_le_bytes([row[bit / 8], next]);
                        *value = number((both >> (bit % 8)) as u8 & mask as u8);
                    }),
                }
            }
            CodeOrder::Columns => {
                let words = (columns * bits).div_ceil(32);
                let first = line.matrix * words * rows + line.row;
                for (value, column) in values.iter_mut().zip(column..) {
                    let bit = column * bits;
                    let at = first + bit / 32 * rows;
                    let found = straddling(self.codes, at, rows, bit, bits);
                    *value = number((found & mask) as u8);
                }
            }
            CodeOrder::RowPairs => {
                let first = (line.matrix * rows + line.row) / 2 * columns + column;
                let (shift, codes) = (line.row % 2 * 4, &self.codes[first..]);
                for (value, byte) in values.iter_mut().zip(codes) {
                    *value = number(byte >> shift & 15);
                }
            }
            CodeOrder::Interleaved => {
                let (across, shift) = (rows / 8, PLACES[line.row % 8] * 4);
                let first = line.matrix * columns * across + line.row / 8;
                for (value, column) in values.iter_mut().zip(column..) {
                    let word = self.word(first + column * across);
                    *value = number((word >> shift & 15) as u8);
                }
            }
        }
    }

    fn word(&self, at: usize) -> u32 {
        word(self.codes, at)
    }

    /// Returns the zero point of codes that have none stored.
    fn usual_zero(&self) -> i32 {
        match self.format.zero {
            Zero::None => 0,
            _ => 1 << (self.format.element.bits() - 1),
        }
    }

    /// Returns the zero point of a group, which is subtracted from its codes.
    fn zero(&self, line: Line, group: usize) -> i32 {
        let bits = self.format.element.bits();
        let Some(zeros) = self.zeros else {
            return self.usual_zero();
        };
        let Some([down, across]) = self.scales.grid else {
            return i32::from(zeros.bytes[0] as i8);
        };
        let (block, mask) = (line.row / self.scales.block[0], (1u64 << bits) - 1);
        let stored = match self.format.packing {
            CodeOrder::Rows { .. } if self.format.element == CodeType::Int8 => {
                return i32::from(zeros.bytes[self.index(line, group)] as i8);
            }
            CodeOrder::Rows { .. } | CodeOrder::RowPairs => {
                let bit = block * bits;
                let words = (down * bits).div_ceil(32);
                let at = (line.matrix * words + bit / 32) * across + group;
                straddling(zeros.bytes, at, across, bit, bits)
            }
            CodeOrder::Columns => {
                let (words, bit) = ((down * bits).div_ceil(32), block * bits);
                let at = (line.matrix * across + group) * words + bit / 32;
                straddling(zeros.bytes, at, 1, bit, bits)
            }
            CodeOrder::Interleaved => {
                let at = (line.matrix * across + group) * (down / 8) + block / 8;
                u64::from(word(zeros.bytes, at) >> (PLACES[block % 8] * 4))
            }
        };
        // GPTQ stores a zero point of 0 as all ones, so adding one must wrap.
        let more = u64::from(self.format.zero == Zero::LessOne);
        ((stored + more) & mask) as i32
    }
}

/// Returns the bits of word `at` from `bit` of the stream on, and of the next word, `step` words
/// further, if a number of `bits` reaches into that.
fn straddling(bytes: &[u8], at: usize, step: usize, bit: usize, bits: usize) -> u64 {
    let low = u64::from(word(bytes, at)) >> (bit % 32);
    if bit % 32 + bits > 32 {
        low | u64::from(word(bytes, at + step)) << (32 - bit % 32)
    } else {
        low
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let bytes = &bytes[at * 4..at * 4 + 4];
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}
