//! Model families: one function each for the layers with experts and for the layer's spec.

mod biased;
mod deepseek;
mod encoder_decoder;
mod layers;
mod refused;
mod served;
mod several;
mod shared;
mod sigmoid;
mod softmax;

use super::HfError;
use super::config::Config;
use super::draft::Draft;
use crate::suggest::closest;
use layers::Layers;

/// Model types that share one kind of block.
pub(super) struct Family {
    /// Values of `model_type`.
    names: &'static [&'static str],
    /// The layers with experts.
    pub layers: fn(&Config) -> Result<Layers, HfError>,
    /// Builds the spec and recipes of a layer.
    pub build: fn(&Config, usize) -> Result<Draft, HfError>,
}

const TABLES: [&[Family]; 8] = [
    softmax::FAMILIES,
    shared::FAMILIES,
    deepseek::FAMILIES,
    sigmoid::FAMILIES,
    biased::FAMILIES,
    served::FAMILIES,
    several::FAMILIES,
    encoder_decoder::FAMILIES,
];

/// Spellings of four sizes: experts, experts per token, model width, expert width.
pub(super) const EXPERTS: &[&str] = &[
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
];
const TOP_K: &[&str] = &[
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "moe_top_k",
];
const MODEL: &[&str] = &["hidden_size", "d_model"];
const WIDE: &[&str] = &["intermediate_size"];
const NARROW: &[&str] = &["moe_intermediate_size", "expert_ffn_hidden_size"];
const DEPTH: &[&str] = &["num_hidden_layers", "n_layers", "num_layers"];

/// Returns the family of a configuration.
pub(super) fn find(config: &Config) -> Result<&'static Family, HfError> {
    let named = |family: &&Family| family.names.contains(&config.model.as_str());
    let known = all().find(named);
    known.ok_or_else(|| refused::error(&config.model).unwrap_or_else(|| unknown(&config.model)))
}

/// Returns true if a family has that `model_type`.
pub(super) fn is_known(model: &str) -> bool {
    all().any(|family| family.names.contains(&model))
}

/// Returns every recognized but refused `model_type`, with the reason.
pub(super) fn refused() -> impl Iterator<Item = (&'static str, &'static str)> {
    refused::names()
}

/// Returns every supported `model_type`, sorted.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    let mut names: Vec<&str> = all()
        .flat_map(|family| family.names.iter().copied())
        .collect();
    names.sort_unstable();
    names.into_iter()
}

fn all() -> impl Iterator<Item = &'static Family> {
    TABLES.iter().flat_map(|table| table.iter())
}

fn unknown(model: &str) -> HfError {
    HfError::UnknownModel {
        model_type: super::config::shortened(model),
        suggestion: closest(model, names()).map(str::to_string),
        supported: names().map(str::to_string).collect(),
    }
}
