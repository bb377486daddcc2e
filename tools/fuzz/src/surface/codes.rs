//! Mangled configurations beside files of codes and scales.

use super::quantized::{CONFIGS, TENSORS, loads};
use super::weights::file;
use super::{Surface, folder, promise};
use crate::mutate;
use moesaic_spec::hf::import;
use moesaic_spec::testing::SampleRng;
use moesaic_weights::{Checkpoint, LoadOptions};
use std::fs;
use tempfile::TempDir;

/// Words of `quantization_config`.
const WORDS: [&str; 24] = [
    "\"quant_method\": \"fp8\",",
    "\"quant_method\": \"mxfp4\",",
    "\"quant_method\": \"gptq\",",
    "\"quant_method\": \"awq\",",
    "\"quant_method\": \"auto-round\",",
    "\"quant_method\": \"modelopt\",",
    "\"quant_method\": \"compressed-tensors\",",
    "\"format\": \"nvfp4-pack-quantized\",",
    "\"format\": \"mxfp4-pack-quantized\",",
    "\"format\": \"pack-quantized\",",
    "\"bits\": 8,",
    "\"bits\": 2,",
    "\"group_size\": 32,",
    "\"group_size\": -1,",
    "\"sym\": true,",
    "\"zero_point\": false,",
    "\"desc_act\": true,",
    "\"weight_block_size\": [1, 16],",
    "\"weight_block_size\": [0, 0],",
    "\"quant_algo\": \"FP8\",",
    "\"modules_to_not_convert\": [\"mlp\"],",
    "\"ignore\": [\"re:.*\"],",
    "\"dynamic\": {\"-:.*\": {}},",
    "\"quantization_config\": null,",
];

/// A layer's configuration, a zero, and the file that it describes.
pub struct Codes {
    folder: TempDir,
}

impl Codes {
    /// Makes a surface over the layers of [`Quantized`](super::quantized::Quantized).
    pub fn new() -> Codes {
        Codes { folder: folder() }
    }
}

impl Surface for Codes {
    fn name(&self) -> &'static str {
        "codes"
    }

    fn share(&self) -> u64 {
        40
    }

    fn input(&mut self, rng: &mut SampleRng) -> Vec<u8> {
        let configs = CONFIGS.map(str::to_string);
        let mut input = if rng.one_in(2) {
            rng.pick(&configs).into_bytes()
        } else {
            mutate::text(rng, &configs, &WORDS)
        };
        input.push(0);
        input.extend(file(rng, &TENSORS));
        input
    }

    fn check(&mut self, input: &[u8]) -> Result<bool, String> {
        let end = input.iter().position(|byte| *byte == 0);
        let (config, file) = input.split_at(end.unwrap_or(input.len()));
        let config = String::from_utf8_lossy(config);
        let path = self.folder.path().join("weights.safetensors");
        fs::write(&path, file.get(1..).unwrap_or_default()).map_err(|error| error.to_string())?;
        let Ok(checkpoint) = Checkpoint::open(&path) else {
            return Ok(false);
        };
        let options = LoadOptions {
            allow_extra: true,
            ..LoadOptions::default()
        };
        let mut accepted = false;
        for layer in 0..2 {
            match import(&config, layer) {
                Ok(import) => accepted |= loads(&import, &checkpoint, options)?,
                Err(error) => promise(!error.to_string().is_empty(), || {
                    "it says nothing".to_string()
                })?,
            }
        }
        Ok(accepted)
    }
}
