//! The formats in which the routed experts' weights may be stored and multiplied.

use crate::format::ScaleType;
use moesaic_kernel::DType;
use serde::de::{EnumAccess, Error, VariantAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// A storage format of quantized matrices `[rows, columns]`, where rows are output features.
///
/// A weight is `value(code) * scale`, less an offset where the format has offsets. The scale and
/// the offset belong to a block of rows and columns; the last block of a matrix may be smaller.
/// Two formats are equal if they store weights alike, whatever their names.
#[derive(Clone, Copy, Debug)]
pub struct WeightFormat {
    /// The name in a spec: `mxfp4`; empty for a format that a spec describes by a table.
    pub name: &'static str,
    /// The type of a code.
    pub code: WeightCode,
    /// Rows and columns that share a scale; 0 columns for a whole row.
    pub block: [usize; 2],
    /// The type of a scale.
    pub scale: ScaleType,
    /// The columns of a row that share a second, f32 factor of their scales; 0 for a whole row.
    pub second: Option<usize>,
    /// The offset of each block.
    pub offset: Option<OffsetType>,
    /// Who publishes weights so.
    pub origin: &'static str,
}

/// The number that is subtracted from every weight of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OffsetType {
    /// An f16.
    F16,
    /// A byte in two's complement times an f32, which is shared as the second scale is.
    Int8,
    /// A zero point, a byte in two's complement: the offset is that times the block's scale.
    Zero,
}

/// The type of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightCode {
    /// An FP8 number of four bits of exponent and three of mantissa.
    E4m3,
    /// An FP8 number of five bits of exponent and two of mantissa.
    E5m2,
    /// A byte in two's complement.
    Int8,
    /// A byte from zero on.
    Uint8,
    /// Four bits, from -8 on: the code less 8.
    Int4,
    /// Four bits, from zero on.
    Uint4,
    /// An FP4 number of two bits of exponent and one of mantissa.
    E2m1,
    /// Four bits: the index of one of GGUF's 16 unevenly spaced numbers.
    Iq4nl,
}

impl WeightCode {
    /// Bits of a code.
    pub fn bits(self) -> usize {
        match self {
            WeightCode::E4m3 | WeightCode::E5m2 | WeightCode::Int8 | WeightCode::Uint8 => 8,
            WeightCode::Int4 | WeightCode::Uint4 | WeightCode::E2m1 | WeightCode::Iq4nl => 4,
        }
    }

    /// Returns the number that a code stands for.
    pub fn value(self, code: u8) -> f32 {
        use crate::format::{self, code};
        match self {
            WeightCode::E4m3 => code::E4M3[usize::from(code)],
            WeightCode::E5m2 => code::E5M2[usize::from(code)],
            WeightCode::Int8 => f32::from(code as i8),
            WeightCode::Uint8 => f32::from(code),
            WeightCode::Int4 => f32::from(code & 15) - 8.0,
            WeightCode::Uint4 => f32::from(code & 15),
            WeightCode::E2m1 => code::E2M1[usize::from(code & 15)],
            WeightCode::Iq4nl => f32::from(format::NONLINEAR[usize::from(code & 15)]),
        }
    }

    /// Returns a code whose number is finite, and zero where there is such a code.
    pub fn zero(self) -> u8 {
        match self {
            WeightCode::Int4 => 8,
            _ => 0,
        }
    }
}

const F32: ScaleType = ScaleType::F32;
const F16: ScaleType = ScaleType::F16;
const BF16: ScaleType = ScaleType::Bf16;
const E8M0: ScaleType = ScaleType::E8m0;
const E4M3: ScaleType = ScaleType::E4m3;
const INT8: ScaleType = ScaleType::Int8;

/// Columns of a super-block of GGUF.
const SUPER: usize = 256;

const fn row(
    name: &'static str,
    code: WeightCode,
    block: [usize; 2],
    scale: ScaleType,
    origin: &'static str,
) -> WeightFormat {
    WeightFormat {
        name,
        code,
        block,
        scale,
        second: None,
        offset: None,
        origin,
    }
}

impl WeightFormat {
    const fn with_second(self, columns: usize) -> WeightFormat {
        WeightFormat {
            second: Some(columns),
            ..self
        }
    }

    const fn with_offset(self, offset: OffsetType) -> WeightFormat {
        WeightFormat {
            offset: Some(offset),
            ..self
        }
    }
}

/// Every format with a name. A new block-scaled format of these codes is a row here.
#[rustfmt::skip] // a table
pub static WEIGHT_FORMATS: [WeightFormat; 22] = [
    row("fp8", WeightCode::E4m3, [128, 128], F32, "DeepSeek-V3, Qwen3-FP8"),
    row("fp8-row", WeightCode::E4m3, [1, 0], F32, "compressed-tensors, per channel"),
    row("mxfp8", WeightCode::E4m3, [1, 32], E8M0, "OCP MX: MiniMax-M3"),
    row("mxfp4", WeightCode::E2m1, [1, 32], E8M0, "OCP MX: gpt-oss, DeepSeek-V4"),
    row("nvfp4", WeightCode::E2m1, [1, 16], E4M3, "NVIDIA modelopt").with_second(0),
    row("int8", WeightCode::Int8, [1, 0], F32, "per channel"),
    row("int8-g32", WeightCode::Int8, [1, 32], F32, "groups of 32"),
    row("int8-g128", WeightCode::Int8, [1, 128], F32, "groups of 128"),
    row("int4-g32", WeightCode::Int4, [1, 32], BF16, "Kimi-K2-Thinking"),
    row("int4-g64", WeightCode::Int4, [1, 64], BF16, "groups of 64"),
    row("int4-g128", WeightCode::Int4, [1, 128], BF16, "compressed-tensors W4A16"),
    row("uint4-g32", WeightCode::Uint4, [1, 32], F16, "GPTQ, AWQ").with_offset(OffsetType::Zero),
    row("uint4-g64", WeightCode::Uint4, [1, 64], F16, "GPTQ, AWQ").with_offset(OffsetType::Zero),
    row("uint4-g128", WeightCode::Uint4, [1, 128], F16, "GPTQ, AWQ").with_offset(OffsetType::Zero),
    row("q8_0", WeightCode::Int8, [1, 32], F16, "GGUF"),
    row("q4_0", WeightCode::Int4, [1, 32], F16, "GGUF"),
    row("q4_1", WeightCode::Uint4, [1, 32], F16, "GGUF").with_offset(OffsetType::F16),
    row("q4_k", WeightCode::Uint4, [1, 32], INT8, "GGUF").with_second(SUPER).with_offset(OffsetType::Int8),
    row("q5_k", WeightCode::Int8, [1, 32], INT8, "GGUF").with_second(SUPER).with_offset(OffsetType::Int8),
    row("q6_k", WeightCode::Int8, [1, 16], INT8, "GGUF").with_second(SUPER),
    row("iq4_nl", WeightCode::Iq4nl, [1, 32], F16, "GGUF"),
    row("iq4_xs", WeightCode::Iq4nl, [1, 32], INT8, "GGUF").with_second(SUPER),
];

/// The names of [`WEIGHT_FORMATS`], in its order.
pub static WEIGHT_FORMAT_NAMES: [&str; 22] = {
    let mut names = [""; 22];
    let mut at = 0;
    while at < 22 {
        names[at] = WEIGHT_FORMATS[at].name;
        at += 1;
    }
    names
};

impl PartialEq for WeightFormat {
    fn eq(&self, other: &WeightFormat) -> bool {
        Described::from(*self) == Described::from(*other)
    }
}

impl Eq for WeightFormat {}

impl fmt::Display for WeightFormat {
    /// Writes the format as a spec has it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = serde_json::to_value(self).unwrap_or_default();
        write!(f, "{}", crate::write::written(&value))
    }
}

impl WeightFormat {
    /// Returns the format of that name.
    pub fn named(name: &str) -> Option<WeightFormat> {
        let found = WEIGHT_FORMATS.iter().find(|format| format.name == name);
        found.copied()
    }

    /// Returns the same format with its name, if it has one.
    pub fn recognised(self) -> WeightFormat {
        let known = WEIGHT_FORMATS.iter().find(|format| **format == self);
        known.copied().unwrap_or(WeightFormat {
            name: "",
            origin: "a spec",
            ..self
        })
    }

    /// Returns a reason why no kernel can have such weights.
    pub(crate) fn problem(&self) -> Option<String> {
        const LONGEST: usize = 1 << 20;
        let [rows, columns] = self.block;
        if rows == 0 || rows > LONGEST || columns > LONGEST {
            return Some("a block has 1 row or more, and 0 columns for a whole row".to_string());
        }
        let short = self.depth();
        if !columns.is_multiple_of(short) || !short.is_multiple_of(8) {
            let what = "are no multiple of 8 up to 128, and no multiple of 128";
            return Some(format!("{columns} columns of a block {what}"));
        }
        match self.second {
            Some(second) if second > 0 && (columns == 0 || !second.is_multiple_of(columns)) => {
                let what = "columns of a second scale are no multiple of a block's";
                Some(format!("{second} {what}"))
            }
            None if self.offset == Some(OffsetType::Int8) => {
                Some("an offset of int8 needs a second scale".to_string())
            }
            _ => None,
        }
    }

    /// Words of 32 bits that the codes of a row of so many columns fill, the first code in the
    /// lowest bits; what is left of the last word has [`WeightCode::zero`].
    pub fn row_words(&self, columns: usize) -> usize {
        (columns * self.code.bits()).div_ceil(32)
    }

    /// Elements of a column that kernels multiply before they apply its scale: those of a block,
    /// or a part of a long one.
    pub fn depth(&self) -> usize {
        match self.block[1] {
            short @ 1..128 => short,
            _ => 128,
        }
    }

    /// Columns that share a scale, of a matrix of so many.
    pub fn block_columns(&self, columns: usize) -> usize {
        match self.block[1] {
            0 => columns.max(1),
            block => block,
        }
    }

    /// Rows and columns of the scales of a matrix.
    pub fn scale_shape(&self, [rows, columns]: [usize; 2]) -> [usize; 2] {
        let across = columns.div_ceil(self.block_columns(columns));
        [rows.div_ceil(self.block[0]), across]
    }

    /// Rows and columns of the second scales of a matrix; `None` where there are none.
    pub fn second_shape(&self, [rows, columns]: [usize; 2]) -> Option<[usize; 2]> {
        let across = match self.second? {
            0 => 1,
            second => columns.div_ceil(second),
        };
        Some([rows, across])
    }

    /// Returns the tensors that hold a matrix, codes first.
    pub fn tensors(&self, size: [usize; 2]) -> Vec<FormatTensor> {
        let [rows, columns] = size;
        let of = |end, dtype, shape, meaning| FormatTensor {
            end,
            dtype,
            shape,
            meaning,
        };
        let [down, across] = self.scale_shape(size);
        // Four bytes to a word, the first in the lowest bits.
        let words = [down, across.div_ceil(4)];
        let codes = [rows, self.row_words(columns)];
        let scale = "scale of each block of codes";
        let mut list = vec![of("weight", DType::I32, codes, "")];
        list.push(match self.scale.dtype() {
            Some(dtype) => of("scale", dtype, [down, across], scale),
            None => of("scale", DType::I32, words, scale),
        });
        let second = self.second_shape(size);
        if let Some(shape) = second {
            let meaning = "what scales are multiplied by";
            list.push(of("scale_2", DType::F32, shape, meaning));
        }
        let offset = "what is subtracted from the weights of each block";
        match self.offset {
            None => {}
            Some(OffsetType::F16) => list.push(of("offset", DType::F16, [down, across], offset)),
            Some(OffsetType::Zero) => {
                list.push(of("offset", DType::I32, words, "zero point of each block"))
            }
            Some(OffsetType::Int8) => {
                list.push(of("offset", DType::I32, words, offset));
                let meaning = "what offsets are multiplied by";
                list.extend(second.map(|shape| of("offset_2", DType::F32, shape, meaning)));
            }
        }
        list
    }
}

/// A tensor of a quantized matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormatTensor {
    /// The end of its name: `weight`, `scale`, `scale_2`, `offset` or `offset_2`.
    pub end: &'static str,
    /// Its type: `i32` for words of codes, of scales or of offsets that are smaller.
    pub dtype: DType,
    /// Its shape, without experts.
    pub shape: [usize; 2],
    /// A description of its contents; empty for the codes.
    pub meaning: &'static str,
}

/// The table of a format in a spec, which is the format without its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Described {
    code: WeightCode,
    block: [usize; 2],
    scale: ScaleType,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    second: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    offset: Option<OffsetType>,
}

impl From<WeightFormat> for Described {
    fn from(format: WeightFormat) -> Described {
        Described {
            code: format.code,
            block: format.block,
            scale: format.scale,
            second: format.second,
            offset: format.offset,
        }
    }
}

/// The word before the table of a format without a name: `{ custom = { … } }`.
pub(crate) const CUSTOM: &str = "custom";

impl Serialize for WeightFormat {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        if self.name.is_empty() {
            let described = Described::from(*self);
            return to.serialize_newtype_variant("WeightFormat", 0, CUSTOM, &described);
        }
        to.serialize_str(self.name)
    }
}

impl<'de> Deserialize<'de> for WeightFormat {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<WeightFormat, D::Error> {
        struct Formats;
        impl<'de> Visitor<'de> for Formats {
            type Value = WeightFormat;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let names = WEIGHT_FORMAT_NAMES.join(", ");
                write!(f, "one of {names}, or a table `{CUSTOM}`")
            }

            fn visit_enum<A: EnumAccess<'de>>(self, data: A) -> Result<WeightFormat, A::Error> {
                let (name, variant) = data.variant::<String>()?;
                if name == CUSTOM {
                    let Described {
                        code,
                        block,
                        scale,
                        second,
                        offset,
                    } = variant.newtype_variant()?;
                    let format = WeightFormat {
                        name: "",
                        code,
                        block,
                        scale,
                        second,
                        offset,
                        origin: "",
                    };
                    return match format.problem() {
                        Some(problem) => Err(A::Error::custom(problem)),
                        None => Ok(format.recognised()),
                    };
                }
                variant.unit_variant()?;
                let found = WeightFormat::named(&name);
                found.ok_or_else(|| A::Error::unknown_variant(&name, &WEIGHT_FORMAT_NAMES))
            }
        }
        from.deserialize_enum("WeightFormat", &WEIGHT_FORMAT_NAMES, Formats)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_one_format_each_and_read_back() {
        for format in &WEIGHT_FORMATS {
            let named = WeightFormat::named(format.name).unwrap();
            assert_eq!(named, *format);
            assert_eq!(named.problem(), None);
            assert_eq!(named.recognised().name, format.name);
            let text = serde_json::to_string(&named).unwrap();
            let read = serde_json::from_str::<WeightFormat>(&text).unwrap();
            assert_eq!(read.name, format.name);
        }
        assert!(serde_json::from_str::<WeightFormat>("\"fp5\"").is_err());
    }

    #[test]
    fn a_table_describes_any_format() {
        let text = r#"{"custom":{"code":"uint4","block":[1,48],"scale":"bf16","offset":"zero"}}"#;
        let format: WeightFormat = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&format).unwrap(), text);
        let shown =
            r#"{ custom = { block = [1, 48], code = "uint4", offset = "zero", scale = "bf16" } }"#;
        assert_eq!(format.to_string(), shown);
        let known = r#"{"custom":{"code":"int4","block":[1,32],"scale":"f16"}}"#;
        let format: WeightFormat = serde_json::from_str(known).unwrap();
        assert_eq!(format.name, "q4_0");
        for (wrong, problem) in [
            (r#""block":[1,33],"scale":"f16""#, "33 columns"),
            (r#""block":[0,32],"scale":"f16""#, "1 row or more"),
            (r#""block":[1,32],"scale":"f16","second":40"#, "40 columns"),
            (
                r#""block":[1,32],"scale":"f16","offset":"int8""#,
                "needs a second scale",
            ),
        ] {
            let text = format!(r#"{{"custom":{{"code":"int4",{wrong}}}}}"#);
            let error = serde_json::from_str::<WeightFormat>(&text).unwrap_err();
            assert!(error.to_string().contains(problem), "{error}");
        }
    }

    #[test]
    fn rows_are_words_and_scales_cover_the_matrix() {
        let shapes = |name: &str, size| {
            let tensors = WeightFormat::named(name).unwrap().tensors(size);
            let list = tensors.iter().map(|t| (t.end, t.shape));
            list.collect::<Vec<_>>()
        };
        let fp8 = shapes("fp8", [200, 129]);
        assert_eq!(fp8, [("weight", [200, 33]), ("scale", [2, 2])]);
        assert_eq!(
            shapes("int8", [7, 100]),
            [("weight", [7, 25]), ("scale", [7, 1])]
        );
        assert_eq!(
            shapes("mxfp4", [1, 9]),
            [("weight", [1, 2]), ("scale", [1, 1])]
        );
        let q4_k = [
            ("weight", [3, 64]),
            ("scale", [3, 4]),
            ("scale_2", [3, 2]),
            ("offset", [3, 4]),
            ("offset_2", [3, 2]),
        ];
        assert_eq!(shapes("q4_k", [3, 512]), q4_k);
        assert_eq!(shapes("nvfp4", [3, 48])[2], ("scale_2", [3, 1]));
    }
}
