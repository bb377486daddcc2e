//! `quantization_config`: the quantized checkpoints that moesaic reads.

use super::codes::{BLOCKS, Codes, IN_PLACE, PACKED, QWEIGHT, STACKED, StoredFormat, TensorNames};
use super::error::{HfError, shortened};
use crate::format::{self, CodeType, Format, ScaleBlock, Zero};
use serde_json::{Map, Value};

/// Names of E4M3.
const E4M3: [&str; 4] = ["e4m3", "e4m3fn", "float8_e4m3fn", "float8_e4m3"];

/// Names of E5M2.
const E5M2: [&str; 2] = ["e5m2", "float8_e5m2"];

/// Keys that list modules exempt from quantization.
const KEPT: [&str; 5] = [
    "exclude",
    "ignore",
    "modules_to_not_convert",
    "ignored_layers",
    "exclude_modules",
];

/// The settings of modules without settings of their own.
static NOTHING: Value = Value::Null;

/// Reads the codes that a `quantization_config` describes.
pub(super) fn read(model: &str, value: &Value) -> Result<Codes, HfError> {
    let empty = Map::new();
    let reader = Reader {
        model,
        config: value.as_object().unwrap_or(&empty),
    };
    let stored = match reader.word("quant_method") {
        Some("fp8") => reader.fp8(format::FP8_BLOCK)?,
        Some("mxfp8") => reader.fp8(format::MXFP8)?,
        Some("compressed-tensors") => reader.compressed()?,
        Some("mxfp4") => vec![stored(format::MXFP4, BLOCKS)],
        Some("gptq") => reader.gptq()?,
        Some("awq") => reader.awq()?,
        Some("auto-round") => reader.auto_round()?,
        Some("quark") => reader.quark()?,
        // A scale for each row.
        Some("fbgemm_fp8" | "w8a8_fp8") => vec![stored(format::FP8, IN_PLACE)],
        // SGLang's, with scales for rows or for blocks.
        Some("w8a8_int8") => vec![stored(format::INT8, IN_PLACE)],
        Some("blockwise_int8") => reader.blockwise_int8()?,
        Some(method) if method.starts_with("modelopt") => reader.modelopt()?,
        Some(other) => return Err(refused(model, &shortened(other))),
        None if reader.config.contains_key("group_size") => {
            return Err(refused(model, "no quant_method, as MLX writes"));
        }
        None => return Err(refused(model, "no quant_method")),
    };
    let nested = reader.config.get("quantization").and_then(Value::as_object);
    let kept = [Some(reader.config), nested].into_iter().flatten();
    let kept = kept.flat_map(|config| KEPT.iter().filter_map(|key| config.get(*key)?.as_array()));
    let kept = kept.flatten().filter_map(Value::as_str).map(str::to_string);
    Ok(Codes::new(&stored, kept.collect()))
}

/// Copies a ModelOpt folder's `hf_quant_config.json` into its `config.json`, if that lacks a
/// `quantization_config`.
///
/// # Errors
///
/// [`HfError::Json`] if either text is not a JSON object.
pub fn with_quant_config(config: &str, beside: &str) -> Result<String, HfError> {
    let object = |text: &str, file: &str| match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(HfError::Json(format!("{file} is something else"))),
        Err(error) => Err(HfError::Json(format!("{file}: {error}"))),
    };
    let mut config = object(config, "config.json")?;
    let said = config.get("quantization_config");
    if said.is_none_or(Value::is_null) {
        let mut beside = object(beside, "hf_quant_config.json")?;
        let method = Value::from("modelopt");
        beside.entry("quant_method").or_insert(method);
        config.insert("quantization_config".to_string(), Value::Object(beside));
    }
    Ok(Value::Object(config).to_string())
}

/// Returns the error for an unsupported quantization.
pub(super) fn refused(model: &str, method: &str) -> HfError {
    HfError::Quantized {
        model: model.to_string(),
        method: method.to_string(),
    }
}

fn stored(format: Format, names: TensorNames) -> StoredFormat {
    StoredFormat { format, names }
}

/// Returns true unless the value is empty.
fn says(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Object(object) => !object.is_empty(),
        _ => true,
    }
}

/// Returns the sizes of a block that compressed-tensors once spelt "128x128".
fn unspelt(size: &Value) -> Value {
    let text = size.as_str().unwrap_or_default();
    let sizes: Result<Vec<u64>, _> = text.split('x').map(str::parse::<u64>).collect();
    sizes.map_or_else(|_| size.clone(), Value::from)
}

/// A `quantization_config`.
struct Reader<'a> {
    model: &'a str,
    config: &'a Map<String, Value>,
}

impl Reader<'_> {
    fn word(&self, key: &str) -> Option<&str> {
        self.config.get(key)?.as_str()
    }

    fn refused(&self, what: &str) -> HfError {
        refused(self.model, what)
    }

    /// Reads DeepSeek-V3's format, which transformers calls fine-grained, and MiniMax-M3's.
    fn fp8(&self, usual: Format) -> Result<Vec<StoredFormat>, HfError> {
        let named = self.word("fmt").unwrap_or(E4M3[0]);
        let element = match named {
            _ if E4M3.contains(&named) => CodeType::E4m3,
            _ if E5M2.contains(&named) => CodeType::E5m2,
            _ => return Err(self.refused(&format!("fp8, {}", shortened(named)))),
        };
        let of = match self.config.get("weight_block_size") {
            None => usual,
            Some(Value::Null) => format::FP8,
            Some(size) => Format {
                block: ScaleBlock::Tile(self.block("weight_block_size", size)?),
                ..usual
            },
        };
        let bytes = stored(Format { element, ..of }, IN_PLACE);
        // The experts of such checkpoints may be FP4 instead.
        Ok(vec![bytes, stored(format::MXFP4, IN_PLACE)])
    }

    /// Reads SGLang's integers in blocks.
    fn blockwise_int8(&self) -> Result<Vec<StoredFormat>, HfError> {
        let size = self.config.get("weight_block_size");
        let block = self.block("weight_block_size", size.unwrap_or(&Value::Null))?;
        let tiles = Format {
            block: ScaleBlock::Tile(block),
            ..format::INT8
        };
        Ok(vec![stored(tiles, IN_PLACE)])
    }

    /// Reads llm-compressor's format: groups of modules, any of which may hold our layer.
    fn compressed(&self) -> Result<Vec<StoredFormat>, HfError> {
        let refused = |what: &str| self.refused(&format!("compressed-tensors, {what}"));
        let turned = self.config.get("transform_config");
        if turned.is_some_and(|c| c.as_object().is_some_and(|c| !c.is_empty())) {
            return Err(refused("weights that were transformed"));
        }
        let sparse = self.config.get("sparsity_config");
        match sparse.and_then(|sparse| sparse.get("format")?.as_str()) {
            None | Some("dense") => {}
            Some(other) => return Err(refused(&shortened(other))),
        }
        let whole = self.word("format").unwrap_or("no format");
        let groups = self.config.get("config_groups").and_then(Value::as_object);
        let mut ways = Vec::new();
        for group in groups.into_iter().flat_map(Map::values) {
            let Some(weights) = group.get("weights").and_then(Value::as_object) else {
                continue;
            };
            let own = group.get("format").and_then(Value::as_str);
            let way = self.group(own.unwrap_or(whole), weights)?;
            if !ways.contains(&way) {
                ways.push(way);
            }
        }
        if ways.is_empty() {
            Err(refused("no group with weights"))
        } else {
            Ok(ways)
        }
    }

    /// Reads one group of compressed-tensors.
    fn group(&self, named: &str, weights: &Map<String, Value>) -> Result<StoredFormat, HfError> {
        let word = |key: &str| weights.get(key).and_then(Value::as_str);
        let bits = weights.get("num_bits").and_then(Value::as_u64);
        let kind = word("type").unwrap_or("int");
        let skewed = weights.get("symmetric").and_then(Value::as_bool) == Some(false);
        let size = weights.get("group_size").and_then(Value::as_i64);
        let grouped = size.is_some_and(|size| size > 0);
        let usual = if grouped { "group" } else { "tensor" };
        let strategy = word("strategy").unwrap_or(usual);
        let tile = |size: Option<i64>, usual| match usize::try_from(size.unwrap_or(usual)) {
            Ok(size @ 1..) => Ok(ScaleBlock::Tile([1, size])),
            _ => Err(self.bad_group_size(&weights["group_size"])),
        };
        let unread = || {
            let bits = bits.map_or("?".to_string(), |bits| bits.to_string());
            let skew = if skewed { "a" } else { "" };
            let [named, kind, strategy] = [named, kind, strategy].map(shortened);
            let what = format!("weights of {bits} bits, {kind}, {skew}symmetric, by {strategy}");
            self.refused(&format!("compressed-tensors, {named}: {what}"))
        };
        let block = match (strategy, weights.get("block_structure")) {
            ("tensor" | "channel", _) => ScaleBlock::MatrixOrRow,
            ("group" | "tensor_group", _) if size == Some(-1) => ScaleBlock::MatrixOrRow,
            ("group" | "tensor_group", _) => tile(size, 128)?,
            ("block", size) => {
                let size = unspelt(size.unwrap_or(&Value::Null));
                ScaleBlock::Tile(self.block("block_structure", &size)?)
            }
            _ => return Err(unread()),
        };
        let (of, names) = match (named, kind, bits) {
            ("float-quantized" | "naive-quantized", "float", Some(8)) => (format::FP8, IN_PLACE),
            // Fewer bits take a byte each, too.
            ("int-quantized" | "naive-quantized", "int", Some(1..=8)) => (format::INT8, IN_PLACE),
            ("pack-quantized", "int", Some(bits @ 1..=8)) => {
                let element = CodeType::Uint(bits as u8);
                let packed = Format {
                    element,
                    ..format::INT4
                };
                (packed, PACKED)
            }
            ("nvfp4-pack-quantized", "float", Some(4)) => (format::NVFP4_DIVIDED, PACKED),
            ("mxfp4-pack-quantized", "float", Some(4)) => (format::MXFP4, PACKED),
            ("mxfp6-pack-quantized", "float", Some(6)) => (format::MXFP6, PACKED),
            ("mxfp8-quantized", "float", Some(8)) => (format::MXFP8, IN_PLACE),
            (
                "float-quantized"
                | "naive-quantized"
                | "int-quantized"
                | "pack-quantized"
                | "nvfp4-pack-quantized"
                | "mxfp4-pack-quantized"
                | "mxfp6-pack-quantized"
                | "mxfp8-quantized",
                ..,
            ) => return Err(unread()),
            (other, ..) => {
                let other = shortened(other);
                return Err(self.refused(&format!("compressed-tensors, {other}")));
            }
        };
        if skewed && !of.element.is_int() {
            return Err(unread());
        }
        Ok(stored(Format { block, ..of }, names))
    }

    /// Reads NVIDIA's TensorRT Model Optimizer: one `quant_algo`, or one per module.
    fn modelopt(&self) -> Result<Vec<StoredFormat>, HfError> {
        let nested = self.config.get("quantization").and_then(Value::as_object);
        let about = nested.unwrap_or(self.config);
        let mut found = Vec::new();
        let mixed = about.get("quantized_layers").and_then(Value::as_object);
        let each = mixed.into_iter().flat_map(Map::values);
        let each = each.filter_map(Value::as_object).chain([about]);
        for layer in each {
            let algorithm = layer.get("quant_algo").and_then(Value::as_str);
            let algorithm = algorithm.unwrap_or("no quant_algo");
            if algorithm == "MIXED_PRECISION" && mixed.is_some() {
                continue;
            }
            for way in self.algorithm(algorithm, layer)? {
                if !found.contains(&way) {
                    found.push(way);
                }
            }
        }
        if found.is_empty() {
            Err(self.refused("modelopt, no quantized_layers"))
        } else {
            Ok(found)
        }
    }

    /// Returns the forms in which ModelOpt stores the weights of an algorithm.
    fn algorithm(
        &self,
        named: &str,
        layer: &Map<String, Value>,
    ) -> Result<Vec<StoredFormat>, HfError> {
        let of = match named {
            "FP8" | "FP8_PER_CHANNEL_PER_TOKEN" => format::FP8,
            "FP8_PB_WO" => format::FP8_BLOCK,
            "MXFP8" => format::MXFP8,
            "MXFP4" | "W4A8_MXFP4_FP8" => format::MXFP4,
            // Activations of 8 bits have larger blocks of the same weights.
            "NVFP4" | "W4A16_NVFP4" | "NVFP4_W4A16" | "W4A8_NVFP4_FP8" => format::NVFP4,
            "W8A16" => format::INT8,
            other => return Err(self.refused(&format!("modelopt, {}", shortened(other)))),
        };
        let grouped = layer.get("config_groups").and_then(Value::as_object);
        let grouped = grouped.and_then(|groups| groups.values().next()?.get("weights"));
        let sizes = [
            layer.get("group_size"),
            grouped.and_then(|w| w.get("group_size")),
        ];
        let block = match (of.block, sizes.into_iter().flatten().find(|s| !s.is_null())) {
            (ScaleBlock::Tile([1, _]), Some(size)) => self.tile(size)?,
            (block, _) => block,
        };
        let mut ways = vec![stored(Format { block, ..of }, IN_PLACE)];
        if let (format::NVFP4, ScaleBlock::Tile([_, size])) = (of, block) {
            let turned = Format {
                block: ScaleBlock::Tile([size, 1]),
                ..format::NVFP4_TURNED
            };
            ways.push(stored(turned, STACKED));
        }
        Ok(ways)
    }

    /// Reads GPTQ, as AutoGPTQ and GPTQModel write it.
    fn gptq(&self) -> Result<Vec<StoredFormat>, HfError> {
        let named = self.word("checkpoint_format").or(self.word("format"));
        let of = match named.unwrap_or("gptq") {
            "gptq" => format::GPTQ,
            "gptq_v2" => format::GPTQ_V2,
            other => return Err(self.refused(&format!("gptq, {}", shortened(other)))),
        };
        let marlin = self.config.get("is_marlin_format").and_then(Value::as_bool);
        if marlin == Some(true) {
            return Err(self.refused("gptq, marlin"));
        }
        if let Some(word) = self.word("pack_dtype").filter(|word| *word != "int32") {
            return Err(self.refused(&format!("gptq, pack_dtype {}", shortened(word))));
        }
        // GPTQModel's settings of single modules; a leading minus exempts the module.
        let own = self.config.get("dynamic").and_then(Value::as_object);
        let own = own.into_iter().flatten();
        let own = own.filter(|(name, _)| !name.starts_with('-'));
        self.integers("gptq", of, own.map(|(_, settings)| settings))
    }

    /// Reads AWQ, as AutoAWQ writes it.
    fn awq(&self) -> Result<Vec<StoredFormat>, HfError> {
        // AutoAWQ's key, and those of transformers and GPTQModel.
        let keys = ["version", "format", "checkpoint_format"];
        let mut said = keys.into_iter().filter_map(|key| self.word(key));
        if let Some(other) = said.find(|word| !word.eq_ignore_ascii_case("gemm")) {
            return Err(self.refused(&format!("awq, version {}", shortened(other))));
        }
        if self.word("backend") == Some("llm-awq") {
            return Err(self.refused("awq, llm-awq"));
        }
        self.integers("awq", format::AWQ, [])
    }

    /// Reads Intel's AutoRound, which packs as GPTQ or AWQ do.
    fn auto_round(&self) -> Result<Vec<StoredFormat>, HfError> {
        let packing = self.word("packing_format").unwrap_or("no packing_format");
        let kind = self.word("data_type").unwrap_or("int");
        if self.config.get("rotation_config").is_some_and(says) {
            return Err(self.refused("auto-round, rotation_config"));
        }
        let of = match (packing, kind) {
            ("auto_round:auto_gptq" | "auto_round:gptq" | "auto_gptq", "int") => format::GPTQ,
            ("auto_round:auto_awq" | "auto_round:awq" | "auto_awq", "int") => format::AWQ,
            // Zero points as they are.
            ("auto_round" | "auto_round:gptqmodel", "int") => format::GPTQ_V2,
            _ => {
                let [packing, kind] = [packing, kind].map(shortened);
                return Err(self.refused(&format!("auto-round, {packing} of {kind}")));
            }
        };
        // Settings of single modules; 16 bits means not quantized.
        let own = self.config.get("extra_config").and_then(Value::as_object);
        let own = own.into_iter().flat_map(Map::values);
        let own = own.filter(|s| s.get("bits").and_then(Value::as_u64) < Some(16));
        self.integers("auto-round", of, own)
    }

    /// Reads AMD's Quark: a setting for the model, and settings of modules.
    fn quark(&self) -> Result<Vec<StoredFormat>, HfError> {
        let algorithms = self.config.get("algo_config");
        if algorithms.is_some_and(|said| said.to_string().contains("rotation")) {
            return Err(self.refused("quark, weights that were rotated"));
        }
        let of = |key: &str| self.config.get(key).and_then(Value::as_object);
        let own = [of("layer_quant_config"), of("layer_type_quant_config")];
        let own = own.into_iter().flatten().flat_map(Map::values);
        let all = own.chain(self.config.get("global_quant_config"));
        let weights = all.filter_map(|settings| settings.get("weight"));
        let mut ways = Vec::new();
        for weights in weights.filter(|weights| says(weights)) {
            let way = self.quark_weights(weights)?;
            if !ways.contains(&way) {
                ways.push(way);
            }
        }
        if ways.is_empty() {
            Err(self.refused("quark, no weights"))
        } else {
            Ok(ways)
        }
    }

    fn quark_weights(&self, weights: &Value) -> Result<StoredFormat, HfError> {
        let word = |key: &str| weights.get(key).and_then(Value::as_str);
        let (kind, by) = (word("dtype"), word("qscheme"));
        let powers = word("scale_format") == Some("e8m0");
        let axis = weights.get("ch_axis").and_then(Value::as_i64);
        let size = || self.tile(weights.get("group_size").unwrap_or(&Value::Null));
        let of = match (kind, by, powers, axis) {
            (Some("fp4"), Some("per_group"), true, Some(-1 | 1)) => Format {
                block: size()?,
                ..format::MXFP4
            },
            (Some("fp8_e4m3"), Some("per_group"), true, Some(-1 | 1)) => Format {
                block: size()?,
                ..format::MXFP8
            },
            (Some("fp8_e4m3"), Some("per_tensor"), false, _)
            | (Some("fp8_e4m3"), Some("per_channel"), false, Some(0)) => format::FP8,
            (Some("fp8_e4m3"), Some("per_block"), false, _) => {
                let size = weights.get("block_size").unwrap_or(&Value::Null);
                Format {
                    block: ScaleBlock::Tile(self.block("block_size", size)?),
                    ..format::FP8_BLOCK
                }
            }
            _ if weights.is_array() => return Err(self.refused("quark, weights quantized twice")),
            (kind, by, ..) => {
                let [kind, by] = [kind, by].map(|word| shortened(word.unwrap_or("?")));
                return Err(self.refused(&format!("quark, {kind} {by}")));
            }
        };
        Ok(stored(of, IN_PLACE))
    }

    /// Returns integer formats with the checkpoint's bits and group size, and with those of single
    /// modules.
    fn integers<'v>(
        &self,
        method: &str,
        of: Format,
        own: impl IntoIterator<Item = &'v Value>,
    ) -> Result<Vec<StoredFormat>, HfError> {
        let get = |keys: [&str; 2]| keys.iter().find_map(|key| self.config.get(*key));
        let mut ways = Vec::new();
        for own in [&NOTHING].into_iter().chain(own) {
            let bits = own.get("bits").or(get(["bits", "w_bit"]));
            let size = own
                .get("group_size")
                .or(get(["group_size", "q_group_size"]));
            let element = match (of.packing, bits.and_then(Value::as_u64)) {
                (_, Some(4)) => CodeType::Uint(4),
                (format::CodeOrder::Columns, Some(bits @ (2 | 3 | 8))) => {
                    CodeType::Uint(bits as u8)
                }
                (_, bits) => {
                    let bits = bits.map_or("?".to_string(), |bits| bits.to_string());
                    return Err(self.refused(&format!("{method} of {bits} bits")));
                }
            };
            let block = match size {
                None => of.block,
                Some(size) if size.as_i64() == Some(-1) => ScaleBlock::Row,
                Some(size) => self.tile(size)?,
            };
            let format = Format {
                element,
                block,
                ..of
            };
            let said = own.get("desc_act").or(self.config.get("desc_act"));
            let columns = of.packing == format::CodeOrder::Columns;
            let names = TensorNames {
                reordered: columns && said.and_then(Value::as_bool) == Some(true),
                ..QWEIGHT
            };
            let way = stored(format, names);
            if !ways.contains(&way) {
                ways.push(way);
            }
        }
        debug_assert!(of.zero != Zero::None);
        Ok(ways)
    }

    /// Returns a block of `size` columns.
    fn tile(&self, size: &Value) -> Result<ScaleBlock, HfError> {
        match size.as_u64().map(usize::try_from) {
            Some(Ok(size @ 1..)) => Ok(ScaleBlock::Tile([1, size])),
            _ => Err(self.bad_group_size(size)),
        }
    }

    fn bad_group_size(&self, found: &Value) -> HfError {
        HfError::BadKey {
            model: self.model.to_string(),
            key: "quantization_config.group_size".to_string(),
            found: shortened(&found.to_string()),
            expected: "columns of a group, above zero".to_string(),
        }
    }

    /// Reads two sizes, each at least 1.
    fn block(&self, key: &str, value: &Value) -> Result<[usize; 2], HfError> {
        let size = |value: &Value| usize::try_from(value.as_u64()?).ok().filter(|n| *n > 0);
        let sizes: Option<Vec<usize>> = value.as_array().and_then(|l| l.iter().map(size).collect());
        let block = sizes.and_then(|sizes| <[usize; 2]>::try_from(sizes).ok());
        block.ok_or_else(|| HfError::BadKey {
            model: self.model.to_string(),
            key: format!("quantization_config.{key}"),
            found: shortened(&value.to_string()),
            expected: "rows and columns of a block, both above zero".to_string(),
        })
    }
}
