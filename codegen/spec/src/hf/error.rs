//! Errors in a configuration.

use thiserror::Error;

/// The reason a configuration cannot be imported.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HfError {
    /// Not JSON, or not an object.
    #[error("the configuration is not a JSON object: {0}")]
    Json(String),

    /// There is no `model_type`.
    #[error("the configuration has no `model_type`; config.json of a model directory has one")]
    NoModelType,

    /// The model type is unknown.
    #[error("model type `{model_type}` is not supported{}; supported are {}", hint(.suggestion), .supported.join(", "))]
    UnknownModel {
        /// The model type in the configuration.
        model_type: String,
        /// The closest supported one.
        suggestion: Option<String>,
        /// All supported ones.
        supported: Vec<String>,
    },

    /// A needed key is absent and transformers has no default for it.
    #[error("{model}: the configuration has no {}", or_list(.keys))]
    MissingKey {
        /// The model type.
        model: String,
        /// Accepted spellings.
        keys: Vec<String>,
    },

    /// A key has a value of the wrong type or out of range.
    #[error("{model}: `{key}` is {found}, expected {expected}")]
    BadKey {
        /// The model type.
        model: String,
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// The accepted values.
        expected: String,
    },

    /// A key that this family does not read asks for other routing than the family computes.
    #[error(
        "{model}: `{key}` = {value} asks for something else than layers of this type compute \
         ({about}): remove the key if the model was not trained with it, or write the spec by hand"
    )]
    Routing {
        /// The model type.
        model: String,
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// The subject of the key.
        about: String,
    },

    /// The layer has no experts.
    #[error("layer {layer} of this {model} model is dense; its MoE layers are {moe}")]
    DenseLayer {
        /// The model type.
        model: String,
        /// The layer that you asked for.
        layer: usize,
        /// The MoE layers, as ranges.
        moe: String,
    },

    /// No layer has experts.
    #[error("this {model} model has no MoE layer: {why}")]
    NoMoeLayer {
        /// The model type.
        model: String,
        /// The keys that decide it.
        why: String,
    },

    /// The layer does not exist.
    #[error(
        "layer {layer} does not exist: this {model} model has {layers} layers, its MoE layers are {moe}"
    )]
    LayerOutOfRange {
        /// The model type.
        model: String,
        /// The layer that you asked for.
        layer: usize,
        /// The number of layers in the model.
        layers: usize,
        /// The MoE layers, as ranges.
        moe: String,
    },

    /// The spec has no axis for a value.
    #[error(
        "{model}: `{key}` = {value} cannot be expressed: the spec has no axis for {axis}; {remedy}"
    )]
    Unsupported {
        /// The model type.
        model: String,
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// The missing axis.
        axis: String,
        /// The change to make.
        remedy: String,
    },

    /// The spec has no axis for a property of every model in the family.
    #[error("{model}: the layer cannot be expressed: {does}; the spec has {has}")]
    Family {
        /// The model type.
        model: String,
        /// The block's property.
        does: String,
        /// The spec's closest counterpart.
        has: String,
    },

    /// The numbers make no valid layer.
    #[error("{model}: the configuration describes no valid layer: {problems}")]
    Invalid {
        /// The model type.
        model: String,
        /// The broken rules.
        problems: String,
    },

    /// The weights are quantized in a form that moesaic does not read.
    #[error(
        "{model}: the quantization is not supported ({method}); supported are fp8, mxfp8, \
         fbgemm_fp8, w8a8_fp8, w8a8_int8, blockwise_int8, gpt_oss's mxfp4, gptq, awq (gemm), \
         auto-round, modelopt's FP8, MXFP8, MXFP4, NVFP4 and W8A16, quark's FP8 and MXFP4, and \
         compressed-tensors' float-, int- and pack-quantized, mxfp4, mxfp6, mxfp8 and nvfp4: use \
         such a checkpoint, or one in f32, f16 or bf16"
    )]
    Quantized {
        /// The model type.
        model: String,
        /// `quant_method`, with the unsupported part.
        method: String,
    },
}

fn hint(suggestion: &Option<String>) -> String {
    suggestion
        .as_ref()
        .map(|s| format!("; did you mean `{s}`?"))
        .unwrap_or_default()
}

fn or_list(keys: &[String]) -> String {
    let quoted: Vec<String> = keys.iter().map(|k| format!("`{k}`")).collect();
    quoted.join(" or ")
}

/// Returns text for a message, cut when long.
pub(super) fn shortened(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_string(),
    }
}
