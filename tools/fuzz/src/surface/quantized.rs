//! Quantized checkpoints: codes and scales of wrong types and shapes.

use super::weights::{file, held};
use super::{Surface, folder, promise};
use moesaic::WeightSource;
use moesaic_spec::canonical_tensors;
use moesaic_spec::hf::{Import, import};
use moesaic_spec::testing::SampleRng;
use moesaic_weights::{Checkpoint, LayerReader, LoadOptions, set_expert_formats};
use std::fs;
use tempfile::TempDir;

/// Layers that the files are for, the same tensors for all: FP8 in blocks that do not divide
/// the widths, in rows, and MXFP4; integers of compressed-tensors, GPTQ and AWQ, and NVFP4; MXFP6
/// beside integers that straddle words, and NVFP4 of stacks that are stored transposed.
pub(super) const CONFIGS: [&str; 9] = [
    r#"{"model_type": "qwen3_moe", "hidden_size": 5, "moe_intermediate_size": 3, "num_experts": 2,
        "num_experts_per_tok": 1, "num_hidden_layers": 1,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 4]}}"#,
    r#"{"model_type": "qwen3_moe", "hidden_size": 5, "moe_intermediate_size": 3, "num_experts": 2,
        "num_experts_per_tok": 1, "num_hidden_layers": 1,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": null}}"#,
    r#"{"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32,
        "num_local_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1,
        "quantization_config": {"quant_method": "mxfp4"}}"#,
    r#"{"model_type": "qwen3_moe", "hidden_size": 32, "moe_intermediate_size": 32,
        "num_experts": 1, "num_experts_per_tok": 1, "num_hidden_layers": 2,
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16}}"#,
    r#"{"model_type": "qwen3_moe", "hidden_size": 32, "moe_intermediate_size": 32,
        "num_experts": 1, "num_experts_per_tok": 1, "num_hidden_layers": 2,
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 16}}"#,
    r#"{"model_type": "qwen3_moe", "hidden_size": 32, "moe_intermediate_size": 32,
        "num_experts": 1, "num_experts_per_tok": 1, "num_hidden_layers": 2,
        "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "strategy": "group",
        "group_size": 16, "symmetric": false}}}}}"#,
    r#"{"model_type": "qwen3_moe", "hidden_size": 32, "moe_intermediate_size": 32,
        "num_experts": 1, "num_experts_per_tok": 1, "num_hidden_layers": 2,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}"#,
    r#"{"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 32,
        "num_local_experts": 1, "num_experts_per_tok": 1, "num_hidden_layers": 1,
        "quantization_config": {"quant_method": "compressed-tensors", "config_groups": {
        "a": {"format": "mxfp6-pack-quantized", "weights": {"num_bits": 6, "type": "float",
        "strategy": "group", "group_size": 32}},
        "b": {"format": "pack-quantized", "weights": {"num_bits": 3, "type": "int",
        "strategy": "group", "group_size": 16, "symmetric": false}}}}}"#,
    r#"{"model_type": "llama4_text", "hidden_size": 16, "intermediate_size": 16,
        "num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
        "num_hidden_layers": 1,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}"#,
];

/// Names and shapes of the tensors of all, and scales for both kinds of FP8.
pub(super) const TENSORS: [(&str, &str, &[u64]); 65] = [
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
    ("layers.0.block_sparse_moe.gate.weight", "BF16", &[1, 32]),
    (
        "layers.0.block_sparse_moe.experts.0.w1.weight_packed",
        "U8",
        &[32, 24],
    ),
    (
        "layers.0.block_sparse_moe.experts.0.w1.weight_scale",
        "U8",
        &[32, 1],
    ),
    (
        "layers.0.block_sparse_moe.experts.0.w3.weight_packed",
        "U8",
        &[32, 24],
    ),
    (
        "layers.0.block_sparse_moe.experts.0.w3.weight_scale",
        "U8",
        &[32, 1],
    ),
    (
        "layers.0.block_sparse_moe.experts.0.w2.weight_packed",
        "I32",
        &[32, 3],
    ),
    (
        "layers.0.block_sparse_moe.experts.0.w2.weight_scale",
        "BF16",
        &[32, 2],
    ),
    (
        "layers.0.block_sparse_moe.experts.0.w2.weight_zero_point",
        "I32",
        &[3, 2],
    ),
    ("layers.0.feed_forward.router.weight", "BF16", &[2, 16]),
    (
        "layers.0.feed_forward.experts.gate_up_proj",
        "U8",
        &[2, 8, 32],
    ),
    (
        "layers.0.feed_forward.experts.gate_up_proj_weight_scale",
        "F8_E4M3",
        &[2, 1, 32],
    ),
    (
        "layers.0.feed_forward.experts.gate_up_proj_weight_scale_2",
        "F32",
        &[],
    ),
    ("layers.0.feed_forward.experts.down_proj", "U8", &[2, 8, 16]),
    (
        "layers.0.feed_forward.experts.down_proj_weight_scale",
        "F8_E4M3",
        &[2, 1, 16],
    ),
    (
        "layers.0.feed_forward.experts.down_proj_weight_scale_2",
        "F32",
        &[],
    ),
    (
        "layers.0.feed_forward.shared_expert.gate_proj.weight",
        "BF16",
        &[16, 16],
    ),
    (
        "layers.0.feed_forward.shared_expert.up_proj.weight",
        "BF16",
        &[16, 16],
    ),
    (
        "layers.0.feed_forward.shared_expert.down_proj.weight",
        "U8",
        &[16, 8],
    ),
    (
        "layers.0.feed_forward.shared_expert.down_proj.weight_scale",
        "F8_E4M3",
        &[16, 1],
    ),
    // Layer 1 has experts in several forms at once; each configuration reads its own.
    ("layers.1.mlp.gate.weight", "BF16", &[1, 32]),
    ("layers.1.mlp.experts.0.gate_proj.qweight", "I32", &[4, 32]),
    ("layers.1.mlp.experts.0.gate_proj.scales", "F16", &[2, 32]),
    ("layers.1.mlp.experts.0.gate_proj.qzeros", "I32", &[2, 4]),
    ("layers.1.mlp.experts.0.gate_proj.g_idx", "I32", &[32]),
    (
        "layers.1.mlp.experts.0.gate_proj.weight_packed",
        "I32",
        &[32, 4],
    ),
    (
        "layers.1.mlp.experts.0.gate_proj.weight_zero_point",
        "I32",
        &[4, 2],
    ),
    ("layers.1.mlp.experts.0.gate_proj.weight", "U8", &[32, 16]),
    (
        "layers.1.mlp.experts.0.gate_proj.weight_scale",
        "F8_E4M3",
        &[32, 2],
    ),
    (
        "layers.1.mlp.experts.0.gate_proj.weight_scale_2",
        "F32",
        &[],
    ),
    ("layers.1.mlp.experts.0.up_proj.qweight", "I32", &[4, 32]),
    ("layers.1.mlp.experts.0.up_proj.scales", "F16", &[2, 32]),
    ("layers.1.mlp.experts.0.up_proj.qzeros", "I32", &[2, 4]),
    ("layers.1.mlp.experts.0.up_proj.g_idx", "I32", &[32]),
    (
        "layers.1.mlp.experts.0.up_proj.weight_packed",
        "I32",
        &[32, 4],
    ),
    (
        "layers.1.mlp.experts.0.up_proj.weight_zero_point",
        "I32",
        &[4, 2],
    ),
    ("layers.1.mlp.experts.0.up_proj.weight", "U8", &[32, 16]),
    (
        "layers.1.mlp.experts.0.up_proj.weight_scale",
        "F8_E4M3",
        &[32, 2],
    ),
    ("layers.1.mlp.experts.0.up_proj.weight_scale_2", "F32", &[]),
    ("layers.1.mlp.experts.0.down_proj.qweight", "I32", &[4, 32]),
    ("layers.1.mlp.experts.0.down_proj.scales", "F16", &[2, 32]),
    ("layers.1.mlp.experts.0.down_proj.qzeros", "I32", &[2, 4]),
    ("layers.1.mlp.experts.0.down_proj.g_idx", "I32", &[32]),
    (
        "layers.1.mlp.experts.0.down_proj.weight_packed",
        "I32",
        &[32, 4],
    ),
    (
        "layers.1.mlp.experts.0.down_proj.weight_zero_point",
        "I32",
        &[4, 2],
    ),
    ("layers.1.mlp.experts.0.down_proj.weight", "U8", &[32, 16]),
    (
        "layers.1.mlp.experts.0.down_proj.weight_scale",
        "F8_E4M3",
        &[32, 2],
    ),
    (
        "layers.1.mlp.experts.0.down_proj.weight_scale_2",
        "F32",
        &[],
    ),
];

/// A layer of a quantized checkpoint.
pub struct Quantized {
    folder: TempDir,
    imports: Vec<Import>,
}

impl Quantized {
    /// Over small layers of every kind.
    pub fn new() -> Quantized {
        let layers = [0, 0, 0, 1, 1, 1, 1, 0, 0];
        let imports = CONFIGS.iter().zip(layers);
        let imports = imports.map(|(config, layer)| import(config, layer).expect("it is read"));
        Quantized {
            folder: folder(),
            imports: imports.collect(),
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

    fn input(&mut self, rng: &mut SampleRng) -> Vec<u8> {
        file(rng, &TENSORS)
    }

    fn check(&mut self, input: &[u8]) -> Result<bool, String> {
        let path = self.folder.path().join("weights.safetensors");
        fs::write(&path, input).map_err(|error| error.to_string())?;
        let Ok(checkpoint) = Checkpoint::open(&path) else {
            return Ok(false);
        };
        let mut accepted = false;
        // Each layer has experts in the forms of all configurations.
        let options = LoadOptions {
            allow_extra: true,
            ..LoadOptions::default()
        };
        for import in &self.imports {
            accepted |= loads(import, &checkpoint, options)?;
        }
        Ok(accepted)
    }
}

/// Loads a layer as numbers, and as the codes that the checkpoint has. Returns true if it has
/// numbers.
pub(super) fn loads(
    import: &Import,
    checkpoint: &Checkpoint,
    options: LoadOptions,
) -> Result<bool, String> {
    let numbers = whole(import, checkpoint, options)?;
    let mut stored = import.clone();
    let formats = set_expert_formats(&mut stored, checkpoint, options);
    let says = |reason: &String| !reason.is_empty();
    promise(formats.dequantized.iter().all(says), || {
        "it does not say why the experts are numbers".to_string()
    })?;
    if formats.up.is_some() {
        whole(&stored, checkpoint, options)?;
    }
    Ok(numbers)
}

/// Loads a layer. Returns true if all of its tensors are there, of the spec's types and shapes, and
/// the same one expert at a time.
fn whole(import: &Import, checkpoint: &Checkpoint, options: LoadOptions) -> Result<bool, String> {
    let reader = LayerReader::of_import(import, checkpoint, options);
    let loaded = reader.and_then(|reader| Ok((reader.load()?, reader)));
    let (loaded, reader) = match loaded {
        Ok(loaded) => loaded,
        Err(error) => {
            let said = !error.to_string().is_empty();
            return promise(said, || "it says nothing".to_string()).map(|()| false);
        }
    };
    for tensor in canonical_tensors(&import.spec) {
        let found = held(&loaded, &tensor)?;
        if tensor.name.starts_with("experts.") {
            let last = tensor.shape[0] - 1..tensor.shape[0];
            let row = reader.rows(&tensor.name, last.clone());
            let row = row.map_err(|error| error.to_string())?;
            promise(found.rows(last).ok().as_ref() == Some(&row), || {
                format!("the last expert of `{}` is another one", tensor.name)
            })?;
        }
    }
    Ok(true)
}
