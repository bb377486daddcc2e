//! The record `g.codes` of CPU GEMM templates: quantized matrices, as a kernel decodes them.

use crate::unit::Unit;
use moesaic_kernel::DType;
use moesaic_plan::{CodePanel, GroupedGemmDesc};
use moesaic_spec::format::ScaleType;
use moesaic_spec::{OffsetType, WeightCode};
use serde::Serialize;

/// Quantized matrices, for the template that decodes them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct CodesText {
    /// The format as a spec has it.
    format: String,
    /// Bits of a code.
    bits: usize,
    /// Elements of a column that a lane of codes has.
    unit: usize,
    /// How a vector of codes becomes numbers.
    decode: Decode,
    /// The numbers of a table.
    table: Vec<f32>,
    /// The bits of the same numbers in bf16, once or twice: as many as an index can count.
    table_bf16: Vec<u16>,
    /// The same numbers as bytes that have no sign.
    table_bytes: Vec<u8>,
    /// Bytes are twice the numbers.
    halves: bool,
    /// The number by which bytes are larger than what they stand for.
    byte_bias: u8,
    /// The codes of zero that fill up a row: those of a byte, or of a word where lanes are words.
    fill: u32,
    /// Bits that packing turns over in each word: the signs of integers, so that they count from
    /// zero.
    flip: u32,
    /// 2^23 and the number of the byte 0 that packing leaves.
    bias: f32,
    /// Elements of a column in a block.
    depth: usize,
    /// Blocks of a record.
    blocks: usize,
    /// Records of a panel.
    records: usize,
    /// Bytes of a record.
    record_bytes: usize,
    /// Columns of a panel.
    columns: usize,
    /// Codes decode to pairs of bf16.
    pairs: bool,
    /// Rows of a matrix that share a scale.
    block_rows: usize,
    /// Columns of a matrix that share a scale.
    block_columns: usize,
    /// Rows of the matrix of scales.
    scale_rows: usize,
    /// Columns of the matrix of scales.
    scale_columns: usize,
    /// Bytes of a row of codes before they are packed.
    row_bytes: usize,
    /// Type of a scale.
    scale: ScaleType,
    /// The C type of a scale, and of an offset.
    scale_c: &'static str,
    offset_c: &'static str,
    /// The scale of NaN as C, where there is one.
    scale_nan: &'static str,
    /// Bytes of a row of scales before they are packed, and of offsets.
    scale_row_bytes: usize,
    offset_row_bytes: usize,
    /// Factor of scales: numbers are decoded smaller by it.
    factor: f32,
    /// Whether columns share second scales, and the columns of the matrix of those.
    second: bool,
    second_columns: usize,
    /// The type of an offset; empty where there are none.
    offset: &'static str,
    /// The ends of the tensors that hold a matrix after its name.
    parts: Vec<String>,
}

/// How a vector of codes becomes numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Decode {
    /// A table of 16 numbers.
    Table,
    /// Signed bytes are integers.
    Signed,
    /// Unsigned bytes are integers.
    Unsigned,
    /// Bytes count from a number on: they become the lowest bits of 2^23.
    Counted,
    /// A table of 16 bytes, four of which are looked up for each word.
    TableOfBytes,
    /// Half a byte is multiplied as it is.
    Nibbles,
    /// Bytes are multiplied as they are.
    Bytes,
    /// E4M3, 256 times smaller: as the upper byte of an f16, or as bf16 by way of a table of the
    /// subnormal numbers.
    E4m3,
    /// The upper byte of an f16.
    E5m2,
}

impl Decode {
    fn of(code: WeightCode, unit: Unit) -> Decode {
        match code {
            WeightCode::Int8 | WeightCode::Uint8 if unit == Unit::Bytes => Decode::Bytes,
            _ if unit == Unit::Bytes && ByteTable::of(code).is_count() => Decode::Nibbles,
            _ if unit == Unit::Bytes => Decode::TableOfBytes,
            WeightCode::Int8 | WeightCode::Uint8 if unit == Unit::Pairs => Decode::Counted,
            WeightCode::Int8 => Decode::Signed,
            WeightCode::Uint8 => Decode::Unsigned,
            WeightCode::E4m3 => Decode::E4m3,
            WeightCode::E5m2 => Decode::E5m2,
            _ => Decode::Table,
        }
    }
}

/// Entries of a table that an instruction looks 16-bit numbers up in.
const LOOKED_UP: usize = 32;

/// Sixteen codes as bytes without a sign.
struct ByteTable {
    bytes: Vec<u8>,
    /// The byte of zero.
    bias: u8,
    /// The number of a code over that of its byte.
    factor: f32,
}

impl ByteTable {
    fn of(code: WeightCode) -> ByteTable {
        // Halves are doubled to be integers.
        let factor = if code == WeightCode::E2m1 { 0.5 } else { 1.0 };
        let numbers = (0..16).map(|at| (code.value(at) / factor) as i32);
        let least = numbers.clone().min().unwrap_or(0).min(0);
        ByteTable {
            bytes: numbers.map(|number| (number - least) as u8).collect(),
            bias: -least as u8,
            factor,
        }
    }

    /// Returns whether the byte of each code is the code.
    fn is_count(&self) -> bool {
        self.bytes.iter().copied().eq(0..16)
    }
}

impl CodesText {
    pub fn new(d: &GroupedGemmDesc, panel: CodePanel, unit: Unit) -> CodesText {
        let format = panel.format;
        let (code, size) = (format.code, [d.outer, d.inner]);
        let decode = Decode::of(code, unit);
        let numbers = match decode {
            Decode::Table => 16,
            // The subnormal ones.
            Decode::E4m3 => 8,
            _ => 0,
        };
        let smaller = if decode == Decode::E4m3 { 256.0 } else { 1.0 };
        let table = (0..numbers).map(|at| code.value(at) / smaller);
        let table: Vec<f32> = table.collect();
        // Small numbers of few bits: bf16 has them exactly.
        let bf16 = table.iter().map(|n| (n.to_bits() >> 16) as u16);
        let table_bf16 = bf16.cycle().take(if numbers > 0 { LOOKED_UP } else { 0 });
        let table_bf16: Vec<u16> = table_bf16.collect();
        let [scale_rows, scale_columns] = format.scale_shape(size);
        let bytes = |dtype: Option<DType>| match dtype {
            Some(dtype) => scale_columns * dtype.size(),
            None => scale_columns.next_multiple_of(4),
        };
        let zero = code.zero();
        let counted = matches!(decode, Decode::Counted | Decode::Bytes);
        let flip = if counted && code == WeightCode::Int8 {
            0x80
        } else {
            0
        };
        let byte_table = match decode {
            Decode::TableOfBytes | Decode::Nibbles => ByteTable::of(code),
            _ => ByteTable {
                bytes: Vec::new(),
                bias: flip,
                factor: 1.0,
            },
        };
        let words = unit != Unit::F32 || code.bits() == 4;
        let code_mask = (1 << code.bits()) - 1;
        let parts = format.tensors(size).into_iter();
        CodesText {
            format: format.to_string(),
            bits: code.bits(),
            unit: if words { 32 / code.bits() } else { 1 },
            decode,
            table,
            table_bf16,
            table_bytes: byte_table.bytes,
            halves: byte_table.factor < 1.0,
            byte_bias: byte_table.bias,
            fill: u32::from(zero) * if words { 0xffff_ffff / code_mask } else { 1 },
            flip: u32::from(flip) * 0x0101_0101,
            bias: (1 << 23) as f32 + f32::from(flip),
            depth: panel.depth,
            blocks: panel.blocks,
            records: panel.records,
            record_bytes: panel.record_bytes(),
            columns: panel.columns,
            pairs: unit == Unit::Pairs,
            block_rows: format.block[0],
            block_columns: format.block_columns(d.inner),
            scale_rows,
            scale_columns,
            row_bytes: 4 * format.row_words(d.inner),
            scale: format.scale,
            scale_c: match format.scale {
                ScaleType::F32 => "f32",
                ScaleType::F16 => "f16",
                ScaleType::Bf16 => "bf16",
                ScaleType::E8m0 | ScaleType::E4m3 => "u8",
                ScaleType::Int8 => "i8",
            },
            offset_c: match format.offset {
                Some(OffsetType::F16) => "f16",
                _ => "i8",
            },
            scale_nan: match format.scale {
                ScaleType::F32 => "__builtin_nanf(\"\")",
                ScaleType::F16 => "0x7e00",
                ScaleType::Bf16 => "0x7fc0",
                ScaleType::E8m0 => "0xff",
                ScaleType::E4m3 | ScaleType::Int8 => "",
            },
            scale_row_bytes: bytes(format.scale.dtype()),
            offset_row_bytes: bytes(match format.offset {
                Some(OffsetType::F16) => Some(DType::F16),
                _ => None,
            }),
            factor: smaller
                * byte_table.factor
                * match format.scale {
                    ScaleType::E4m3 => 256.0,
                    _ => 1.0,
                },
            second: format.second.is_some(),
            second_columns: format.second_shape(size).map_or(0, |[_, columns]| columns),
            offset: match format.offset {
                None => "",
                Some(OffsetType::F16) => "f16",
                Some(OffsetType::Int8) => "int8",
                Some(OffsetType::Zero) => "zero",
            },
            parts: parts.map(|part| part.end.to_string()).collect(),
        }
    }
}

/// Returns the texts that a field of [`CodesText`] can be.
#[cfg(test)]
pub(crate) fn texts(field: &str) -> Vec<String> {
    use crate::literal::names;
    match field {
        "decode" => names(&[
            Decode::Table,
            Decode::Signed,
            Decode::Unsigned,
            Decode::Counted,
            Decode::TableOfBytes,
            Decode::Nibbles,
            Decode::Bytes,
            Decode::E4m3,
            Decode::E5m2,
        ]),
        "scale_nan" => vec![String::new()],
        "offset" => ["f16", "int8", "zero", ""].map(str::to_string).to_vec(),
        "scale" => names(&[
            ScaleType::F32,
            ScaleType::F16,
            ScaleType::Bf16,
            ScaleType::E8m0,
            ScaleType::E4m3,
            ScaleType::Int8,
        ]),
        _ => Vec::new(),
    }
}
