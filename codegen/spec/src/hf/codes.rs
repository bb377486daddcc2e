//! Quantized checkpoints: which are read, and what their tensors hold.

use super::HfError;
use super::config::shortened;
use serde_json::{Map, Value};

/// What a quantized checkpoint holds in place of numbers: codes of 8 or 4 bits, with
/// scales in a tensor beside them. A number is what its code stands for times its scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// FP8 E4M3, a byte each, in matrices; or, in bytes of type I8, FP4 E2M1 as
    /// [`Codes::Mxfp4`] has it, with the codes of a row side by side.
    Fp8 {
        /// Rows and columns of a matrix that share a scale; the last may be fewer. Scales
        /// are `[…, rows / block, columns / block]`, rounded up. None: they are one for a
        /// matrix, or one for each of its rows. A single scale is always that of all.
        block: Option<[usize; 2]>,
    },
    /// FP4 E2M1 as `[…, rows, columns / 32, 16]`, bytes of two codes each, the first of them
    /// in the low half; scales `[…, rows, columns / 32]` are powers of two (E8M0).
    Mxfp4,
}

/// The block of FP8 checkpoints that name none.
const BLOCK: [usize; 2] = [128, 128];

/// What E4M3 is called.
const E4M3: [&str; 4] = ["e4m3", "e4m3fn", "float8_e4m3fn", "float8_e4m3"];

/// Formats of compressed-tensors that have FP8 codes a byte each.
const FLOAT_QUANTIZED: [&str; 2] = ["float-quantized", "naive-quantized"];

impl Codes {
    /// Where the scales of the codes under `name` may be, most usual first.
    pub fn scales(&self, name: &str) -> Vec<String> {
        // Cut off the end of the name, and put there.
        let ends: &[(&str, &str)] = match self {
            Codes::Fp8 { .. } => &[
                ("", "_scale_inv"),
                ("", "_scale"),
                (".weight", ".scale"),
                (".weight", ".qscale_weight"),
            ],
            Codes::Mxfp4 => &[("_blocks", "_scales")],
        };
        let ends = ends.iter();
        ends.filter_map(|(cut, put)| Some(name.strip_suffix(cut)?.to_string() + put))
            .collect()
    }

    /// The codes that a `quantization_config` speaks of.
    pub(super) fn read(model: &str, value: &Value) -> Result<Codes, HfError> {
        let empty = Map::new();
        let reader = Reader {
            model,
            config: value.as_object().unwrap_or(&empty),
        };
        match reader.word("quant_method") {
            Some("fp8") => reader.fp8(),
            Some("compressed-tensors") => reader.compressed(),
            Some("mxfp4") => Ok(Codes::Mxfp4),
            Some(other) => Err(refused(model, &shortened(other))),
            None => Err(refused(model, "no quant_method")),
        }
    }
}

/// The error for a quantization that is not read.
pub(super) fn refused(model: &str, method: &str) -> HfError {
    HfError::Quantized {
        model: model.to_string(),
        method: method.to_string(),
    }
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

    /// DeepSeek-V3's way, which transformers calls fine-grained.
    fn fp8(&self) -> Result<Codes, HfError> {
        let format = self.word("fmt").unwrap_or(E4M3[0]);
        if !E4M3.contains(&format) {
            return Err(refused(self.model, &format!("fp8, {}", shortened(format))));
        }
        let block = match self.config.get("weight_block_size") {
            None => Some(BLOCK),
            Some(Value::Null) => None,
            Some(size) => Some(self.block("weight_block_size", size)?),
        };
        Ok(Codes::Fp8 { block })
    }

    /// What llm-compressor writes: groups of modules, of which ours may be in any.
    fn compressed(&self) -> Result<Codes, HfError> {
        let refused = |what: &str| refused(self.model, &format!("compressed-tensors, {what}"));
        let format = self.word("format").unwrap_or("no format");
        if !FLOAT_QUANTIZED.contains(&format) {
            return Err(refused(&shortened(format)));
        }
        let turned = self.config.get("transform_config");
        if turned.is_some_and(|c| c.as_object().is_some_and(|c| !c.is_empty())) {
            return Err(refused("weights that were transformed"));
        }
        let groups = self.config.get("config_groups").and_then(Value::as_object);
        let weights = groups.into_iter().flat_map(Map::values);
        let mut weights = weights.filter_map(|group| group.get("weights")?.as_object());
        let first = weights.next();
        let first = first.ok_or_else(|| refused("no group with weights"))?;
        let codes = self.group(first)?;
        for other in weights {
            if self.group(other)? != codes {
                return Err(refused("groups with other blocks"));
            }
        }
        Ok(codes)
    }

    /// One group of compressed-tensors.
    fn group(&self, weights: &Map<String, Value>) -> Result<Codes, HfError> {
        let word = |key: &str| weights.get(key).and_then(Value::as_str);
        let bits = weights.get("num_bits").and_then(Value::as_u64);
        let skewed = weights.get("symmetric").and_then(Value::as_bool) == Some(false);
        let strategy = word("strategy").unwrap_or("tensor");
        let read = ["tensor", "channel", "block"].contains(&strategy);
        if bits != Some(8) || word("type") != Some("float") || skewed || !read {
            let bits = bits.map_or("?".to_string(), |bits| bits.to_string());
            let skew = if skewed { "a" } else { "" };
            let [kind, strategy] = [word("type").unwrap_or("?"), strategy].map(shortened);
            let what = format!("weights of {bits} bits, {kind}, {skew}symmetric, by {strategy}");
            return Err(refused(self.model, &format!("compressed-tensors, {what}")));
        }
        let block = match (strategy, weights.get("block_structure")) {
            ("block", size) => Some(self.block("block_structure", size.unwrap_or(&Value::Null))?),
            _ => None,
        };
        Ok(Codes::Fp8 { block })
    }

    /// Two sizes from one on.
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
