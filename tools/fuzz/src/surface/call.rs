//! Calls of a layer with tensors of a file, as `moesaic run` makes them: the
//! last check before addresses of memory.

use super::{Surface, folder, promise, weights};
use moesaic::spec::LayerSpec;
use moesaic::weights::Checkpoint;
use moesaic::{Engine, EngineOptions, Input, Layer, Tensor, Tensors, reference};
use moesaic_spec::testing::SampleRng;
use std::fs;
use tempfile::TempDir;

const SPECS: [&str; 2] = [
    "shape = { model_dim = 3, hidden_dim = 2, experts = 4, top_k = 2 }\n\
     router = { kind = \"table\", table_rows = 5, token_mask = true, active_k = true }",
    "shape = { model_dim = 3, hidden_dim = 2, experts = 4, top_k = 2 }\n\
     router = { kind = \"external\" }\ncapacity = { mode = \"factor\", factor = 0.5 }",
];

const TENSORS: [(&str, &str, &[u64]); 6] = [
    ("x", "F32", &[4, 3]),
    ("token_ids", "I32", &[4]),
    ("token_mask", "I32", &[4]),
    ("active_k", "I32", &[1]),
    ("topk_ids", "I32", &[4, 2]),
    ("topk_weights", "F32", &[4, 2]),
];

/// Two layers on this CPU, made on the first call.
pub struct Call {
    folder: TempDir,
    layers: Option<Vec<Layer>>,
}

impl Call {
    /// Makes the surface; compiles nothing yet.
    pub fn new() -> Call {
        Call {
            folder: folder(),
            layers: None,
        }
    }
}

fn layer(text: &str) -> Layer {
    let spec = LayerSpec::from_toml(text).expect("it is valid");
    let engine = Engine::open("cpu", EngineOptions::default()).expect("a C compiler");
    let values = reference::Weights::random(&spec, 1);
    let mut weights = Tensors::new();
    for tensor in moesaic::spec::canonical_tensors(&spec) {
        let data = values.get(&tensor.name).data.iter();
        let tensor = match tensor.dtype {
            moesaic::DType::I32 => (
                tensor.name,
                Tensor::owned(&tensor.shape, data.map(|v| *v as i32).collect()),
            ),
            _ => (
                tensor.name,
                Tensor::owned(&tensor.shape, data.map(|v| *v as f32).collect()),
            ),
        };
        weights.insert(&tensor.0, tensor.1);
    }
    engine.layer(&spec, &weights).expect("it compiles")
}

/// Writes small integers over ids, more often than not in range.
fn integers(rng: &mut SampleRng, bytes: &mut [u8]) {
    let ids = [0, 1, 2, 3, 4, 5, -1, -2, 7, i32::MAX, i32::MIN];
    let most = if rng.one_in(3) { ids.len() - 1 } else { 3 };
    for word in bytes.chunks_exact_mut(4) {
        word.copy_from_slice(&ids[rng.between(0, most)].to_le_bytes());
    }
}

impl Surface for Call {
    fn name(&self) -> &'static str {
        "call"
    }

    fn share(&self) -> u64 {
        10
    }

    fn input(&mut self, rng: &mut SampleRng) -> Vec<u8> {
        let mut bytes = weights::file(rng, &TENSORS);
        let header = bytes
            .first_chunk()
            .map_or(0, |length| u64::from_le_bytes(*length));
        let data = (header as usize).saturating_add(8);
        if let Some(data) = bytes.get_mut(data..) {
            integers(rng, data);
        }
        bytes
    }

    fn check(&mut self, input: &[u8]) -> Result<bool, String> {
        let path = self.folder.path().join("input.safetensors");
        fs::write(&path, input).map_err(|error| error.to_string())?;
        let Ok(file) = Checkpoint::open(&path) else {
            return Ok(false);
        };
        let mut call = Input::default();
        for name in file.names() {
            let tensor = file.tensor(name).ok_or("a name without a tensor")?;
            let Ok(held) = tensor.tensor() else { continue };
            if name == "x" {
                call.tokens = tensor.shape.first().copied().unwrap_or_default();
            }
            call.insert(name, held);
        }
        let layers = self.layers.as_ref().ok_or("there are no layers")?;
        let mut accepted = false;
        for layer in layers {
            match layer.forward(call.reading(&["y", "topk_ids", "counts"])) {
                Ok(output) => {
                    accepted = true;
                    let shape = &output.y().shape;
                    promise(*shape == [call.tokens, 3], || format!("y is {shape:?}"))?;
                }
                Err(error) => promise(!error.to_string().is_empty(), || {
                    "it says nothing".to_string()
                })?,
            }
        }
        Ok(accepted)
    }

    fn begin(&mut self) {
        self.layers.get_or_insert_with(|| SPECS.map(layer).into());
    }
}
