//! Hugging Face configurations in, layer specs and tensor recipes out.
//!
//! [`import`] reads the text of a `config.json` and gives the spec of one MoE
//! layer together with a [`TensorSource`] for each of its canonical tensors:
//! data that says from which tensors of the checkpoint it is put together.
//! Nothing here opens a file; loading crates carry the recipes out.
//!
//! Keys may have the spelling of the hub or that of a model saved by
//! transformers; absent keys have the defaults of transformers.

mod codes;
mod config;
mod draft;
mod error;
mod families;
mod json;
mod quantization;
mod routing;
mod source;

pub use codes::{Codes, End, Names, Stored, replaced};
pub use error::HfError;
pub use json::parse_json;
pub use quantization::with_quant_config;
pub use routing::{RoutingKeys, routing_keys};
pub(crate) use source::half_of;
pub use source::{Alternative, Parts, Step, TensorSource, canonical_sources};

use crate::LayerSpec;
use config::Config;
use std::ops::Range;

/// One MoE layer of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Import {
    /// What the layer computes. Weights and activations have the checkpoint's
    /// element type; when the configuration names none, f32, or bf16 where the checkpoint is
    /// quantized.
    pub spec: LayerSpec,
    /// One recipe per canonical tensor of `spec`, in their order.
    pub sources: Vec<TensorSource>,
    /// What a user should know: what is not taken over, what `x` is.
    pub notes: Vec<String>,
    /// What the names of the layer's own MoE block begin with.
    pub block: Vec<String>,
    /// What the names of tensors in there begin with that are another layer's, or of no use.
    pub beside: Vec<String>,
    /// Numbers of experts in tensors of their own that are another layer's, or of no use.
    pub others: Range<usize>,
}

impl Import {
    /// Whether a tensor of that name is part of this layer's MoE block, so that one without a
    /// recipe is something the configuration does not speak of. Scales of quantized tensors and
    /// what quantizers keep of activations are not.
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

/// The spec and tensor recipes of layer `layer` of the model that
/// `config_json` describes.
///
/// Layers count from zero. Those of an encoder-decoder model are numbered
/// through: the encoder's first, then the decoder's.
///
/// # Errors
///
/// [`HfError`] says what is wrong with the configuration: text that is not
/// JSON, a model type that is not supported, a checkpoint that is quantized in a
/// way that is not read, a layer that is dense or does not exist, a value no axis
/// of the spec can express.
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

/// The MoE layers of the model that `config_json` describes, ascending.
///
/// # Errors
///
/// As [`import`].
pub fn moe_layers(config_json: &str) -> Result<Vec<usize>, HfError> {
    let config = Config::parse(config_json, families::is_known)?;
    Ok((families::find(&config)?.layers)(&config)?.moe)
}

/// Every `model_type` that [`import`] refuses for what its block does, with that.
pub fn refused_models() -> Vec<(&'static str, &'static str)> {
    families::refused().collect()
}

/// Every `model_type` that [`import`] reads.
pub fn supported_models() -> Vec<&'static str> {
    families::names().collect()
}
