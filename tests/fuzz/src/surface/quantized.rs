//! Quantized checkpoints: codes and scales of wrong types and shapes.

use super::weights::file;
use super::{Surface, folder, promise};
use moesaic_spec::canonical_tensors;
use moesaic_spec::hf::{Import, import};
use moesaic_spec::testing::Counter;
use moesaic_weights::{Checkpoint, LoadOptions, load_import};
use std::fs;
use tempfile::TempDir;

/// Layers that the files are for, the same tensors for all: FP8 in blocks that do not divide
/// the widths, in rows, and MXFP4.
const CONFIGS: [&str; 3] = [
    r#"{"model_type": "qwen3_moe", "hidden_size": 5, "moe_intermediate_size": 3, "num_experts": 2,
        "num_experts_per_tok": 1, "num_hidden_layers": 1,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 4]}}"#,
    r#"{"model_type": "qwen3_moe", "hidden_size": 5, "moe_intermediate_size": 3, "num_experts": 2,
        "num_experts_per_tok": 1, "num_hidden_layers": 1,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": null}}"#,
    r#"{"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32,
        "num_local_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1,
        "quantization_config": {"quant_method": "mxfp4"}}"#,
];

/// Names and shapes of the tensors of all, and scales for both kinds of FP8.
const TENSORS: [(&str, &str, &[u64]); 18] = [
    ("layers.0.mlp.gate.weight", "BF16", &[2, 5]),
    (
        "layers.0.mlp.experts.0.gate_proj.weight",
        "F8_E4M3",
        &[3, 5],
    ),
    (
        "layers.0.mlp.experts.0.gate_proj.weight_scale_inv",
        "F32",
        &[2, 2],
    ),
    ("layers.0.mlp.experts.1.gate_proj.weight", "BF16", &[3, 5]),
    ("layers.0.mlp.experts.0.up_proj.weight", "F8_E4M3", &[3, 5]),
    (
        "layers.0.mlp.experts.0.up_proj.weight_scale",
        "F8_E8M0",
        &[2, 2],
    ),
    ("layers.0.mlp.experts.1.up_proj.weight", "F8_E4M3", &[3, 5]),
    ("layers.0.mlp.experts.1.up_proj.weight_scale", "BF16", &[]),
    ("layers.0.mlp.experts.down_proj", "F8_E4M3", &[2, 5, 3]),
    (
        "layers.0.mlp.experts.down_proj_scale_inv",
        "F32",
        &[2, 3, 1],
    ),
    ("layers.0.mlp.router.weight", "BF16", &[2, 64]),
    ("layers.0.mlp.router.bias", "BF16", &[2]),
    (
        "layers.0.mlp.experts.gate_up_proj_blocks",
        "U8",
        &[2, 64, 2, 16],
    ),
    (
        "layers.0.mlp.experts.gate_up_proj_scales",
        "U8",
        &[2, 64, 2],
    ),
    ("layers.0.mlp.experts.gate_up_proj_bias", "BF16", &[2, 64]),
    ("layers.0.mlp.experts.down_proj_bias", "BF16", &[2, 64]),
    (
        "layers.0.mlp.experts.down_proj_blocks",
        "U8",
        &[2, 64, 1, 16],
    ),
    ("layers.0.mlp.experts.down_proj_scales", "U8", &[2, 64, 1]),
];

/// A layer of a quantized checkpoint.
pub struct Quantized {
    folder: TempDir,
    imports: Vec<Import>,
}

impl Quantized {
    /// Over small layers of every kind.
    pub fn new() -> Quantized {
        let imports = CONFIGS.map(|config| import(config, 0).expect("it is read"));
        Quantized {
            folder: folder(),
            imports: imports.to_vec(),
        }
    }
}

impl Surface for Quantized {
    fn name(&self) -> &'static str {
        "quantized"
    }

    fn share(&self) -> u64 {
        40
    }

    fn input(&mut self, rng: &mut Counter) -> Vec<u8> {
        file(rng, &TENSORS)
    }

    fn check(&mut self, input: &[u8]) -> Result<bool, String> {
        let path = self.folder.path().join("weights.safetensors");
        fs::write(&path, input).map_err(|error| error.to_string())?;
        let Ok(checkpoint) = Checkpoint::open(&path) else {
            return Ok(false);
        };
        let mut accepted = false;
        for import in &self.imports {
            let loaded = match load_import(import, &checkpoint, LoadOptions::default()) {
                Ok(loaded) => loaded,
                Err(error) => {
                    promise(!error.to_string().is_empty(), || {
                        "it says nothing".to_string()
                    })?;
                    continue;
                }
            };
            accepted = true;
            for tensor in canonical_tensors(&import.spec) {
                let found = loaded.get(&tensor.name).ok_or("a tensor is missing")?;
                let bytes = tensor.shape.iter().product::<usize>() * tensor.dtype.size();
                let fits = found.shape == tensor.shape && found.data.len() == bytes;
                promise(fits, || {
                    format!("`{}` is loaded as {:?}", tensor.name, found.shape)
                })?;
            }
        }
        Ok(accepted)
    }
}
