//! The formats in which the routed experts' weights may be stored and multiplied.

use moesaic_kernel::DType::{self, Bf16, F16, F32};
use serde::de::{EnumAccess, Error, VariantAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// A storage format of quantised matrices `[rows, columns]`, where rows are output features.
///
/// A weight is `value(code) * scale`, less `offset` where the format has one. The scale, and the
/// offset, belong to a block of rows and columns; the last block of a matrix may be smaller.
#[derive(Debug, PartialEq, Eq)]
pub struct WeightFormat {
    /// The name in a spec: `mxfp4`.
    pub name: &'static str,
    /// The type of a code.
    pub code: WeightCode,
    /// Rows and columns that share a scale; 0 columns for a whole row.
    pub block: [usize; 2],
    /// The type of a scale: the narrowest that holds the published one exactly.
    pub scale: DType,
    /// Whether each block has an offset, of f32, which is subtracted from its weights.
    pub offset: bool,
    /// Who publishes weights so.
    pub origin: &'static str,
}

/// The type of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
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

const fn row(
    name: &'static str,
    code: WeightCode,
    block: [usize; 2],
    scale: DType,
    offset: bool,
    origin: &'static str,
) -> WeightFormat {
    WeightFormat {
        name,
        code,
        block,
        scale,
        offset,
        origin,
    }
}

/// Every format. A new block-scaled format of these codes is a row here.
#[rustfmt::skip] // a table
pub static WEIGHT_FORMATS: [WeightFormat; 20] = [
    row("fp8", WeightCode::E4m3, [128, 128], F32, false, "DeepSeek-V3, Qwen3-FP8"),
    row("fp8-row", WeightCode::E4m3, [1, 0], F32, false, "compressed-tensors, per channel"),
    row("mxfp8", WeightCode::E4m3, [1, 32], Bf16, false, "OCP MX: MiniMax-M3"),
    row("mxfp4", WeightCode::E2m1, [1, 32], Bf16, false, "OCP MX: gpt-oss, DeepSeek-V4"),
    row("nvfp4", WeightCode::E2m1, [1, 16], F32, false, "NVIDIA modelopt"),
    row("int8", WeightCode::Int8, [1, 0], F32, false, "per channel"),
    row("int8-g32", WeightCode::Int8, [1, 32], F32, false, "groups of 32"),
    row("int8-g128", WeightCode::Int8, [1, 128], F32, false, "groups of 128"),
    row("int4-g32", WeightCode::Int4, [1, 32], Bf16, false, "Kimi-K2-Thinking"),
    row("int4-g64", WeightCode::Int4, [1, 64], Bf16, false, "groups of 64"),
    row("int4-g128", WeightCode::Int4, [1, 128], Bf16, false, "compressed-tensors W4A16"),
    row("uint4-g32", WeightCode::Uint4, [1, 32], F16, true, "GPTQ, AWQ"),
    row("uint4-g64", WeightCode::Uint4, [1, 64], F16, true, "GPTQ, AWQ"),
    row("uint4-g128", WeightCode::Uint4, [1, 128], F16, true, "GPTQ, AWQ"),
    row("q8_0", WeightCode::Int8, [1, 32], F16, false, "GGUF"),
    row("q4_0", WeightCode::Int4, [1, 32], F16, false, "GGUF"),
    row("q4_1", WeightCode::Uint4, [1, 32], F16, true, "GGUF"),
    row("q4_k", WeightCode::Uint4, [1, 32], F32, true, "GGUF, of 6-bit scales"),
    row("q6_k", WeightCode::Int8, [1, 16], F32, false, "GGUF, of 8-bit scales"),
    row("iq4_nl", WeightCode::Iq4nl, [1, 32], F16, false, "GGUF"),
];

/// The names of [`WEIGHT_FORMATS`], in its order.
pub static WEIGHT_FORMAT_NAMES: [&str; 20] = {
    let mut names = [""; 20];
    let mut at = 0;
    while at < 20 {
        names[at] = WEIGHT_FORMATS[at].name;
        at += 1;
    }
    names
};

/// The format of the routed experts' matrices: a row of [`WEIGHT_FORMATS`].
#[derive(Clone, Copy, Debug)]
pub struct ExpertFormat(pub &'static WeightFormat);

impl ExpertFormat {
    /// Returns the format of that name.
    pub fn named(name: &str) -> Option<ExpertFormat> {
        WEIGHT_FORMATS
            .iter()
            .find(|format| format.name == name)
            .map(ExpertFormat)
    }
}

impl std::ops::Deref for ExpertFormat {
    type Target = WeightFormat;

    fn deref(&self) -> &WeightFormat {
        self.0
    }
}

impl PartialEq for ExpertFormat {
    fn eq(&self, other: &ExpertFormat) -> bool {
        self.0.name == other.0.name
    }
}

impl Eq for ExpertFormat {}

impl WeightFormat {
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
}

impl Serialize for ExpertFormat {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.0.name)
    }
}

impl<'de> Deserialize<'de> for ExpertFormat {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<ExpertFormat, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = ExpertFormat;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "one of {}", WEIGHT_FORMAT_NAMES.join(", "))
            }

            fn visit_enum<A: EnumAccess<'de>>(self, data: A) -> Result<ExpertFormat, A::Error> {
                let (name, variant) = data.variant::<String>()?;
                variant.unit_variant()?;
                let found = ExpertFormat::named(&name);
                found.ok_or_else(|| A::Error::unknown_variant(&name, &WEIGHT_FORMAT_NAMES))
            }
        }
        from.deserialize_enum("ExpertFormat", &WEIGHT_FORMAT_NAMES, Names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_one_format_each_and_read_back() {
        for format in &WEIGHT_FORMATS {
            let named = ExpertFormat::named(format.name).unwrap();
            assert_eq!(named.0, format);
            let text = serde_json::to_string(&named).unwrap();
            assert_eq!(serde_json::from_str::<ExpertFormat>(&text).unwrap(), named);
        }
        assert!(serde_json::from_str::<ExpertFormat>("\"fp5\"").is_err());
    }

    #[test]
    fn rows_are_words_and_scales_cover_the_matrix() {
        let format = ExpertFormat::named("fp8").unwrap();
        assert_eq!(format.scale_shape([200, 129]), [2, 2]);
        assert_eq!(format.row_words(5), 2);
        let format = ExpertFormat::named("int8").unwrap();
        assert_eq!(format.scale_shape([7, 100]), [7, 1]);
        assert_eq!(ExpertFormat::named("mxfp4").unwrap().row_words(9), 2);
    }
}
