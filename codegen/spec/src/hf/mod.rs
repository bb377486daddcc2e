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
mod quantization;
mod source;

pub use codes::{Codes, End, Names, Stored, replaced};
pub use error::HfError;
pub use quantization::with_quant_config;
pub(crate) use source::half_of;
pub use source::{Alternative, Parts, Step, TensorSource, canonical_sources};

use crate::LayerSpec;
use config::Config;

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
    let config = Config::parse(config_json)?;
    let family = families::find(&config)?;
    let layers = (family.layers)(&config)?;
    layers.check(&config, layer)?;
    let mut draft = (family.build)(&config, layer)?;
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
    let config = Config::parse(config_json)?;
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
