//! Schemes by which `moesaic quantize` writes checkpoints in Hugging Face's layout.
//!
//! A scheme is a row of [`SCHEMES`]: a format, the names of its tensors, and the
//! `quantization_config` that describes both to readers.

use super::codes::{BLOCKS, IN_PLACE, PACKED, QWEIGHT, StoredFormat, TensorNames, end, replaced};
use crate::format::{self, CodeType, Encoded, Format, ScaleBlock, ScaleType, Zero, layout};
use serde_json::{Map, Value, json};

/// A way to quantize a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scheme {
    /// The name on the command line.
    pub name: &'static str,
    /// The published name and its usual readers.
    pub about: &'static str,
    /// The format and the names of its tensors.
    pub stored: StoredFormat,
    /// Whether integer codes get zero points that fit each group.
    pub zero_points: bool,
    /// The group sizes that the scheme allows, the usual one first; none if its blocks are fixed.
    pub groups: &'static [usize],
    method: Method,
}

/// The `quant_method` of a scheme's configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Method {
    Fp8,
    /// compressed-tensors, with the name of its format and what it does with activations.
    Compressed(&'static str, Activations),
    Mxfp4,
    Gptq,
    Awq,
}

/// The activations' quantization that readers are told, computed when a model runs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Activations {
    None,
    PerToken,
    PerGroup,
}

/// Names of codes in place of the float tensor, with scales under the name that most libraries use.
const SCALE: TensorNames = TensorNames {
    scales: &[end("", "_scale")],
    ..IN_PLACE
};

const fn scheme(
    name: &'static str,
    about: &'static str,
    format: Format,
    names: TensorNames,
    method: Method,
) -> Scheme {
    Scheme {
        name,
        about,
        stored: StoredFormat { format, names },
        zero_points: false,
        groups: &[],
        method,
    }
}

/// The group sizes that kernels of GPTQ, AWQ and compressed-tensors take.
const GROUPS: &[usize] = &[128, 64, 32];

/// Every scheme.
#[rustfmt::skip] // a table
pub static SCHEMES: [Scheme; 10] = [
    scheme("fp8", "DeepSeek-V3's E4M3 in blocks of 128 x 128", format::FP8_BLOCK, IN_PLACE, Method::Fp8),
    scheme("fp8-channel", "compressed-tensors float-quantized, E4M3 with a scale per row", format::FP8, SCALE,
        Method::Compressed("float-quantized", Activations::PerToken)),
    scheme("mxfp8", "compressed-tensors mxfp8-quantized, E4M3 in groups of 32", format::MXFP8, SCALE,
        Method::Compressed("mxfp8-quantized", Activations::PerGroup)),
    scheme("mxfp6", "compressed-tensors mxfp6-pack-quantized, E2M3 in groups of 32", format::MXFP6, PACKED,
        Method::Compressed("mxfp6-pack-quantized", Activations::None)),
    scheme("mxfp4", "compressed-tensors mxfp4-pack-quantized; gpt-oss in its own layout", format::MXFP4, PACKED,
        Method::Compressed("mxfp4-pack-quantized", Activations::None)),
    scheme("nvfp4", "compressed-tensors nvfp4-pack-quantized, E2M1 in groups of 16", format::NVFP4_DIVIDED, PACKED,
        Method::Compressed("nvfp4-pack-quantized", Activations::None)),
    scheme("int8", "compressed-tensors int-quantized, a scale per row", format::INT8, SCALE,
        Method::Compressed("int-quantized", Activations::PerToken)),
    Scheme { groups: GROUPS, ..scheme("int4", "compressed-tensors pack-quantized, symmetric", format::INT4, PACKED,
        Method::Compressed("pack-quantized", Activations::None)) },
    Scheme { groups: GROUPS, ..scheme("gptq", "GPTQ's layout of 4 bits, symmetric", format::GPTQ, QWEIGHT, Method::Gptq) },
    Scheme { groups: GROUPS, zero_points: true,
        ..scheme("awq", "AWQ's layout of 4 bits, with zero points", format::AWQ, QWEIGHT, Method::Awq) },
];

/// gpt-oss' own layout of MXFP4, which takes the place of `mxfp4` in the families that read it.
pub static MXFP4_IN_BLOCKS: Scheme = scheme(
    "mxfp4",
    "gpt-oss' layout",
    format::MXFP4,
    BLOCKS,
    Method::Mxfp4,
);

/// A tensor of a quantized matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct SchemeTensor {
    /// The part of the matrix that it holds.
    pub part: SchemePart,
    /// Its name.
    pub name: String,
    /// Its element type, as safetensors spells it.
    pub dtype: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// A part of a quantized matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SchemePart {
    /// The codes.
    Codes,
    /// The scales.
    Scales,
    /// The second scale.
    Second,
    /// The zero points.
    Zeros,
    /// The group of each column.
    Groups,
    /// The row and column counts.
    Shape,
}

impl Scheme {
    /// Returns the scheme of that name.
    pub fn named(name: &str) -> Option<Scheme> {
        SCHEMES.iter().copied().find(|scheme| scheme.name == name)
    }

    /// Returns the scheme with groups of that size, the usual one if none is given. `None` if it
    /// does not allow the size.
    pub fn with_group(mut self, size: Option<usize>) -> Option<Scheme> {
        let format = &mut self.stored.format;
        match (size, self.groups.first()) {
            (None, None) => return Some(self),
            (None, Some(usual)) => format.block = ScaleBlock::Tile([1, *usual]),
            (Some(size), _) if self.groups.contains(&size) => {
                format.block = ScaleBlock::Tile([1, size]);
            }
            (Some(_), _) => return None,
        }
        Some(self)
    }

    /// Returns true for gpt-oss' layout, whose tensors stack the matrices of all experts.
    pub fn stacks(&self) -> bool {
        self.stored.names.in_blocks()
    }

    /// Returns the tensors that take the place of the matrix `name` of that size; of `count`
    /// matrices, if the scheme stacks them. `None` if the scheme has no name for its parts.
    pub fn tensors(&self, name: &str, count: usize, size: [usize; 2]) -> Option<Vec<SchemeTensor>> {
        let StoredFormat { format, names } = &self.stored;
        let integers = format.element.is_int();
        let stored_zeros = matches!(format.zero, Zero::Stored | Zero::LessOne);
        let zeros = names
            .zeros
            .filter(|_| stored_zeros || (self.zero_points && integers));
        let groups = names.groups.filter(|_| self.method == Method::Gptq);
        let shape = |sizes: [usize; 2]| sizes.to_vec();
        let [rows, columns] = size;
        let (codes, scales) = if self.stacks() {
            let groups = columns / 32;
            (vec![count, rows, groups, 16], vec![count, rows, groups])
        } else {
            (
                shape(layout::codes_shape(format, size)),
                shape(layout::scales_shape(format, size)),
            )
        };
        let list = [
            (
                SchemePart::Codes,
                Some(names.codes),
                code_dtype(format.element),
                codes,
            ),
            (
                SchemePart::Scales,
                names.scales.first().copied(),
                scale_dtype(format.scale),
                scales,
            ),
            (
                SchemePart::Second,
                format.second.and(names.second),
                "F32",
                vec![1],
            ),
            (
                SchemePart::Zeros,
                zeros,
                code_dtype(format.element),
                shape(layout::zeros_shape(format, size)),
            ),
            (SchemePart::Groups, groups, "I32", vec![columns]),
            (
                SchemePart::Shape,
                names.shape.filter(|_| integers),
                "I64",
                vec![2],
            ),
        ];
        let present = list.into_iter().filter_map(|(part, end, dtype, shape)| {
            let tensor = |name| SchemeTensor {
                part,
                name,
                dtype,
                shape,
            };
            Some(replaced(name, end?).map(tensor))
        });
        present.collect()
    }

    /// Returns the bytes of a part of an encoded matrix.
    pub fn bytes(&self, part: SchemePart, encoded: &Encoded, size: [usize; 2]) -> Vec<u8> {
        let [_, width] = layout::block(&self.stored.format, size);
        match part {
            SchemePart::Codes => encoded.codes.clone(),
            SchemePart::Scales => encoded.scales.clone(),
            SchemePart::Second => encoded.second.unwrap_or(1.0).to_le_bytes().to_vec(),
            SchemePart::Zeros => encoded.zeros.clone().unwrap_or_default(),
            SchemePart::Groups => {
                let groups = (0..size[1]).map(|column| (column / width) as i32);
                groups.flat_map(i32::to_le_bytes).collect()
            }
            SchemePart::Shape => size
                .iter()
                .flat_map(|n| (*n as i64).to_le_bytes())
                .collect(),
        }
    }

    /// Returns the `quantization_config` of a checkpoint in which `kept` are the modules with
    /// float weights.
    pub fn config(&self, kept: &[String]) -> Value {
        let Format { block, .. } = self.stored.format;
        match self.method {
            Method::Fp8 => json!({
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": match block {
                    ScaleBlock::Tile(block) => json!(block),
                    _ => Value::Null,
                },
                "modules_to_not_convert": kept,
            }),
            Method::Compressed(named, activations) => self.compressed(named, activations, kept),
            Method::Mxfp4 => json!({
                "quant_method": "mxfp4",
                "modules_to_not_convert": kept,
            }),
            Method::Gptq => {
                let skipped = kept.iter().map(|name| (skipped(name), json!({})));
                json!({
                    "quant_method": "gptq",
                    "checkpoint_format": "gptq",
                    "bits": self.stored.format.element.bits(),
                    "group_size": self.group(),
                    "desc_act": false,
                    "sym": !self.zero_points,
                    "lm_head": false,
                    "dynamic": skipped.collect::<Map<String, Value>>(),
                })
            }
            Method::Awq => json!({
                "quant_method": "awq",
                "version": "gemm",
                "bits": self.stored.format.element.bits(),
                "group_size": self.group(),
                "zero_point": self.zero_points,
                "modules_to_not_convert": kept,
            }),
        }
    }

    fn group(&self) -> Option<usize> {
        match self.stored.format.block {
            ScaleBlock::Tile([1, size]) => Some(size),
            _ => None,
        }
    }

    fn compressed(&self, named: &str, activations: Activations, kept: &[String]) -> Value {
        let Format {
            element,
            scale,
            second,
            ..
        } = self.stored.format;
        let strategy = match (self.group(), second) {
            (None, _) => "channel",
            (Some(_), Some(_)) => "tensor_group",
            (Some(_), None) => "group",
        };
        // compressed-tensors names the types of scales that are not those of activations.
        let scales = match scale {
            ScaleType::E8m0 => json!("torch.uint8"),
            ScaleType::E4m3 => json!("torch.float8_e4m3fn"),
            _ => Value::Null,
        };
        let kind = if element.is_int() { "int" } else { "float" };
        let weights = json!({
            "num_bits": element.bits(),
            "type": kind,
            "strategy": strategy,
            "group_size": self.group(),
            "symmetric": !self.zero_points,
            "dynamic": false,
            "observer": "minmax",
            "scale_dtype": scales,
        });
        let of_activations = |strategy: &str| {
            let mut settings = weights.clone();
            settings["strategy"] = json!(strategy);
            settings["dynamic"] = json!(true);
            settings["observer"] = Value::Null;
            settings
        };
        let activations = match activations {
            Activations::None => Value::Null,
            Activations::PerToken => of_activations("token"),
            Activations::PerGroup => of_activations("group"),
        };
        json!({
            "quant_method": "compressed-tensors",
            "format": named,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations,
                "output_activations": Value::Null,
                "format": named,
            }},
            "ignore": kept,
            "kv_cache_scheme": Value::Null,
        })
    }
}

/// Returns GPTQModel's pattern that exempts a module.
fn skipped(module: &str) -> String {
    format!("-:^{}$", module.replace('.', "\\."))
}

fn code_dtype(element: CodeType) -> &'static str {
    match element {
        CodeType::E4m3 => "F8_E4M3",
        CodeType::E5m2 => "F8_E5M2",
        CodeType::E2m3 | CodeType::E2m1 => "U8",
        CodeType::Int8 => "I8",
        CodeType::Uint(_) => "I32",
    }
}

fn scale_dtype(scale: ScaleType) -> &'static str {
    match scale {
        ScaleType::F32 => "F32",
        ScaleType::F16 => "F16",
        ScaleType::Bf16 => "BF16",
        ScaleType::E8m0 => "U8",
        ScaleType::E4m3 => "F8_E4M3",
        ScaleType::Int8 => "I8",
    }
}

#[cfg(test)]
mod tests {
    use super::super::quantization;
    use super::*;

    /// The configuration of each scheme reads as the format that the scheme writes.
    #[test]
    fn configurations_read_back_as_their_formats() {
        let kept = ["lm_head".to_string(), "model.layers.0.mlp.gate".to_string()];
        for scheme in SCHEMES.iter().chain([&MXFP4_IN_BLOCKS]) {
            let sizes = scheme.groups.iter().map(|size| Some(*size)).chain([None]);
            for size in sizes {
                let scheme = scheme.with_group(size).unwrap();
                let codes = quantization::read("m", &scheme.config(&kept)).unwrap();
                let found = codes.stored[0];
                assert_eq!(found.format, scheme.stored.format, "{}", scheme.name);
                assert_eq!(found.names.codes, scheme.stored.names.codes);
                let own = scheme.stored.names.scales[0];
                assert!(found.names.scales.contains(&own), "{}", scheme.name);
                assert!(scheme.name == "gptq" || codes.kept.len() == 2);
            }
            assert!(scheme.with_group(Some(48)).is_none(), "{}", scheme.name);
        }
    }

    #[test]
    fn names_are_those_of_the_libraries() {
        let names = |scheme: &str| -> Vec<String> {
            let scheme = Scheme::named(scheme).unwrap().with_group(None).unwrap();
            let tensors = scheme.tensors("a.weight", 1, [128, 256]).unwrap();
            let said = tensors
                .iter()
                .map(|t| format!("{} {} {:?}", t.name, t.dtype, t.shape));
            said.collect()
        };
        let wanted = [
            "a.weight_packed U8 [128, 128]",
            "a.weight_scale F8_E4M3 [128, 16]",
        ];
        assert_eq!(names("nvfp4")[..2], wanted);
        assert_eq!(names("nvfp4")[2..], ["a.weight_global_scale F32 [1]"]);
        let wanted = [
            "a.weight F8_E4M3 [128, 256]",
            "a.weight_scale_inv F32 [1, 2]",
        ];
        assert_eq!(names("fp8"), wanted);
        let wanted = [
            "a.qweight I32 [32, 128]",
            "a.scales F16 [2, 128]",
            "a.qzeros I32 [2, 16]",
            "a.g_idx I32 [256]",
        ];
        assert_eq!(names("gptq"), wanted);
        let wanted = [
            "a.weight_packed I32 [128, 32]",
            "a.weight_scale BF16 [128, 2]",
            "a.weight_shape I64 [2]",
        ];
        assert_eq!(names("int4"), wanted);
    }
}
