//! Errors in the metadata of a GGUF file.

use crate::hf::HfError;
use thiserror::Error;

/// The reason a layer of a GGUF file cannot be imported.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The file names no architecture.
    #[error("the file has no `general.architecture`; GGUF files of language models have one")]
    NoArchitecture,

    /// moesaic does not read this architecture.
    #[error("architecture `{name}` is not supported; supported are {}", .supported.join(", "))]
    UnknownArchitecture {
        /// The name in the file.
        name: String,
        /// All supported ones.
        supported: Vec<&'static str>,
    },

    /// No architecture of GGUF fits the family of another checkpoint.
    #[error("GGUF has no architecture for {layer}; families with one are {}", .families.join(", "))]
    NoArchitectureFor {
        /// The layer.
        layer: String,
        /// The families that have one.
        families: Vec<&'static str>,
    },

    /// The file's keys and names cannot express a layer of another checkpoint.
    #[error("GGUF files cannot express {what} of {layer}")]
    CannotSay {
        /// The layer.
        layer: String,
        /// The setting or the tensor.
        what: String,
    },

    /// A key is missing.
    #[error("the file has no `{key}`, which llama.cpp's convert script writes for such models")]
    MissingKey {
        /// The key.
        key: String,
    },

    /// A key has an impossible value.
    #[error("`{key}` is {found}, expected {expected}")]
    BadKey {
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// The accepted values.
        expected: String,
    },

    /// The layer has no router.
    #[error(
        "layer {layer} of this {architecture} model has no experts in the file: there is no \
         `blk.{layer}.ffn_gate_inp.weight`; {}", those(.layers)
    )]
    NoExperts {
        /// The architecture.
        architecture: String,
        /// The layer that you asked for.
        layer: usize,
        /// The layers with experts.
        layers: Vec<usize>,
    },

    /// A tensor is missing.
    #[error("the file has no tensor `{tensor}`")]
    MissingTensor {
        /// Its name.
        tensor: String,
    },

    /// The layer has a tensor that no recipe reads.
    #[error(
        "the layer has `{tensor}`, which moesaic does not compute with in {architecture} layers: \
         ignoring it would change the results"
    )]
    StrayTensor {
        /// Its name.
        tensor: String,
        /// The architecture.
        architecture: String,
    },

    /// The family cannot be expressed, or the numbers make no valid layer.
    #[error(transparent)]
    Family(#[from] HfError),
}

fn those(layers: &[usize]) -> String {
    match layers {
        [] => "no layer has one".to_string(),
        [only] => format!("layer {only} has one"),
        [first, .., last] => format!("{} layers from {first} to {last} have one", layers.len()),
    }
}
