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
mod imported;
mod json;
mod quantization;
mod routing;
mod said;
mod scheme;
mod shape;
mod source;

pub use codes::{Codes, NameEnd, StoredFormat, TensorNames, replaced};
pub use error::HfError;
pub use imported::{Import, ModalityRouter, QUANTIZED_NOTE};
pub use json::parse_json;
pub use quantization::with_quant_config;
pub use routing::{RoutingKeys, routing_keys};
pub use scheme::{MXFP4_IN_BLOCKS, SCHEMES, Scheme, SchemePart, SchemeTensor};
pub use shape::{AttentionShape, ModelShape, model_shape};
pub(crate) use source::half_of;
pub use source::{
    Alternative, TensorParts, TensorPiece, TensorSource, TensorStep, canonical_sources,
};

use config::Config;

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
