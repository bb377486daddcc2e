//! Hugging Face configurations in, layer specs and tensor recipes out.
//!
//! [`import`] reads the text of a `config.json`. It returns the spec of one MoE layer, with a
//! [`TensorSource`] for each canonical tensor: a recipe, as data, that assembles it from the
//! tensors of the checkpoint. Nothing here opens a file; the loading crates carry the recipes out.
//!
//! Keys may be spelled as on the hub or as transformers saves them. Absent keys have transformers'
//! defaults.

mod codes;
mod config;
mod draft;
mod error;
mod families;
mod json;
mod quantization;
mod routing;
mod said;
mod scheme;
mod shape;
mod source;

pub use codes::{Codes, NameEnd, StoredFormat, TensorNames, replaced};
pub use error::HfError;
pub use json::parse_json;
pub use quantization::with_quant_config;
pub use routing::{RoutingKeys, routing_keys};
pub use scheme::{MXFP4_IN_BLOCKS, SCHEMES, Scheme, SchemePart, SchemeTensor};
pub use shape::{AttentionShape, ModelShape, model_shape};
pub(crate) use source::half_of;
pub use source::{
    Alternative, TensorParts, TensorPiece, TensorSource, TensorStep, canonical_sources,
};

use crate::LayerSpec;
use config::Config;
use std::ops::Range;

/// The note of an import whose checkpoint is quantized.
pub const QUANTIZED_NOTE: &str = "the checkpoint's weights are quantized and become the layer's \
                                  type when they are read; activations are not quantized";

/// One MoE layer of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Import {
    /// The layer's spec. Weights and activations have the checkpoint's element type; if the
    /// configuration names none, f32, or bf16 for a quantized checkpoint.
    pub spec: LayerSpec,
    /// One recipe per canonical tensor of `spec`, in their order.
    pub sources: Vec<TensorSource>,
    /// Notes for you: settings that were not taken over, or the exact meaning of `x`.
    pub notes: Vec<String>,
    /// Name prefixes of the layer's own MoE block.
    pub block: Vec<String>,
    /// Name prefixes of tensors inside it that belong to another layer or are not used.
    pub beside: Vec<String>,
    /// Indices of experts, in tensors of their own, that belong to another layer or are not used.
    pub others: Range<usize>,
    /// Routers that tokens of some modality have instead of the layer's own, over the same experts.
    pub routers: Vec<ModalityRouter>,
}

/// The router of a modality's tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct ModalityRouter {
    /// The modality: `image`, `audio`.
    pub name: String,
    /// One recipe per canonical tensor whose name begins with `router.`.
    pub sources: Vec<TensorSource>,
}

impl Import {
    /// Returns true if a tensor of that name belongs to this layer's MoE block. If no recipe reads
    /// such a tensor, the configuration does not describe the checkpoint. Scales of quantized
    /// tensors and the statistics that quantizers keep of activations do not count.
    pub fn owns(&self, name: &str) -> bool {
        let leaf = name.rsplit('.').next().unwrap_or(name);
        let codes = ["scale", "zero_point", "g_idx", "weight_shape", "observer"];
        let begins = |list: &[String]| list.iter().any(|part| name.starts_with(part.as_str()));
        let number = name
            .split_once(".experts.")
            .map(|(_, rest)| rest.split('.').next());
        let number = number.flatten().and_then(|digits| digits.parse().ok());
        let other = number.is_some_and(|number| self.others.contains(&number));
        let ours = begins(&self.block) && !begins(&self.beside) && !other;
        ours && !codes.iter().any(|part| leaf.contains(part))
    }
}

/// Imports layer `layer` of the model that `config_json` describes.
///
/// Layers count from zero. In an encoder-decoder model the decoder's layers follow the encoder's.
///
/// # Errors
///
/// [`HfError`] if the text is not JSON, the model type or its quantization is not supported, the
/// layer is dense or does not exist, or the spec cannot express a value.
pub fn import(config_json: &str, layer: usize) -> Result<Import, HfError> {
    let config = Config::parse(config_json, families::is_known)?;
    let family = families::find(&config)?;
    let layers = (family.layers)(&config)?;
    layers.check(&config, layer)?;
    let mut draft = (family.build)(&config, layer)?;
    routing::check(&config, &mut draft, Some(layer))?;
    if let Some(method) = draft.unread() {
        return Err(quantization::refused(&config.model, method));
    }
    draft.spec.name += &format!("-layer{layer}");
    if let Err(problems) = draft.spec.validate() {
        let problems: Vec<String> = problems.iter().map(|p| p.to_string()).collect();
        return Err(HfError::Invalid {
            model: config.model,
            problems: problems.join("; "),
        });
    }
    Ok(draft.finish())
}

/// Returns the MoE layers of the model that `config_json` describes, ascending.
///
/// # Errors
///
/// The same as [`import`].
pub fn moe_layers(config_json: &str) -> Result<Vec<usize>, HfError> {
    let config = Config::parse(config_json, families::is_known)?;
    Ok((families::find(&config)?.layers)(&config)?.moe)
}

/// Returns every `model_type` that [`import`] recognizes and refuses, with the reason.
pub fn refused_models() -> Vec<(&'static str, &'static str)> {
    families::refused().collect()
}

/// Returns every `model_type` that [`import`] reads.
pub fn supported_models() -> Vec<&'static str> {
    families::names().collect()
}
