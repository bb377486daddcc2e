//! A family of models.

use super::super::HfError;
use super::super::config::Config;
use super::super::draft::Draft;
use super::layers::Layers;

/// Model types that share one kind of block.
pub(in crate::hf) struct Family {
    /// Values of `model_type`.
    pub names: &'static [&'static str],
    /// The layers with experts.
    pub layers: fn(&Config) -> Result<Layers, HfError>,
    /// Builds the spec and recipes of a layer.
    pub build: fn(&Config, usize) -> Result<Draft, HfError>,
}
