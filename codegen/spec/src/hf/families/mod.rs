//! Model families: one function each for the layers with experts and for the layer's spec.

mod biased;
mod block;
mod deepseek;
mod encoder_decoder;
mod family;
pub(super) mod keys;
mod layers;
mod refused;
mod served;
mod several;
mod shared;
mod sigmoid;
mod softmax;

use super::config::Config;
use super::error::{HfError, shortened};
use crate::suggest::closest;
use family::Family;

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
        model_type: shortened(model),
        suggestion: closest(model, names()).map(str::to_string),
        supported: names().map(str::to_string).collect(),
    }
}
