//! Metadata of GGUF files in, layer specs and tensor recipes out.
//!
//! [`import`] reads the keys and tensor names that llama.cpp's convert script writes. It returns
//! the spec of one MoE layer with a recipe for each canonical tensor, as
//! [`hf::import`](crate::hf::import) does for a `config.json`. To do so it translates the keys into
//! those of the transformers family that the architecture was converted from, and lets that
//! function read them. Nothing here opens a file.

mod architectures;
mod block;
mod error;
mod metadata;
mod recipes;
mod write;

pub use error::GgufError;
pub use metadata::{GgufValue, Metadata, TensorInfo};
pub use write::{architecture_for, check_keys, keys_for, tensor_name, written_families};

use crate::hf::{self, Import};
use architectures::Architecture;
use block::Block;
use moesaic_kernel::DType;

/// Types of plain numbers in GGUF files. The types of blocks are [`BLOCKS`](crate::format::BLOCKS).
pub const NUMBERS: [DType; 5] = [DType::F32, DType::F16, DType::Bf16, DType::I32, DType::I64];

/// Returns ggml's number of a type of plain numbers.
pub const fn number_id(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::I32 => 26,
        DType::I64 => 27,
        DType::Bf16 => 30,
    }
}

/// Imports layer `layer` from a GGUF file's metadata.
///
/// # Errors
///
/// [`GgufError`] if the architecture is not supported, a key is missing, the layer has no experts,
/// or the layer has a tensor that no recipe reads.
pub fn import(metadata: &Metadata, layer: usize) -> Result<Import, GgufError> {
    let (name, architecture) = architecture(metadata)?;
    let layers = layers(metadata);
    if !layers.contains(&layer) {
        return Err(GgufError::NoExperts {
            architecture: name.to_string(),
            layer,
            layers,
        });
    }
    let block = Block {
        metadata,
        architecture: name,
        layer,
    };
    let (model_type, own) = (architecture.build)(&block)?;
    let mut config = block.config(model_type)?;
    config.extend(own);
    let mut imported = hf::import(&serde_json::Value::Object(config).to_string(), layer)?;
    block.adjust(&mut imported.spec)?;
    imported.spec.name = format!("{name}-layer{layer}");
    imported.sources = recipes::sources(&imported.spec, &block)?;
    if block.dtype().is_none() {
        imported.notes.push(hf::QUANTIZED_NOTE.to_string());
    }
    imported.spec.validate().map_err(|problems| {
        let problems: Vec<String> = problems.iter().map(|p| p.to_string()).collect();
        hf::HfError::Invalid {
            model: name.to_string(),
            problems: problems.join("; "),
        }
    })?;
    Ok(imported)
}

/// Returns the layers with experts, ascending.
///
/// # Errors
///
/// [`GgufError::NoArchitecture`] or [`GgufError::UnknownArchitecture`].
pub fn moe_layers(metadata: &Metadata) -> Result<Vec<usize>, GgufError> {
    architecture(metadata)?;
    Ok(layers(metadata))
}

/// Returns every architecture that [`import`] reads, by llama.cpp's names.
pub fn supported() -> Vec<&'static str> {
    architectures::ALL.iter().map(|a| a.name).collect()
}

fn architecture(metadata: &Metadata) -> Result<(&str, &'static Architecture), GgufError> {
    let Some(GgufValue::Text(name)) = metadata.values.get("general.architecture") else {
        return Err(GgufError::NoArchitecture);
    };
    let found = architectures::ALL.iter().find(|a| a.name == name.as_str());
    let found = found.ok_or_else(|| GgufError::UnknownArchitecture {
        name: name.chars().take(60).collect(),
        supported: supported(),
    })?;
    Ok((name, found))
}

/// Returns the layers that have a router.
fn layers(metadata: &Metadata) -> Vec<usize> {
    let number = |name: &String| -> Option<usize> {
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        (rest == "ffn_gate_inp.weight").then(|| layer.parse().ok())?
    };
    let mut layers: Vec<usize> = metadata.tensors.keys().filter_map(number).collect();
    layers.sort_unstable();
    layers
}
