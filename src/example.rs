//! The layer used by the examples in this crate's documentation.

use crate::{Engine, Error, LayerSpec, Tensor, Tensors};
use moesaic_spec::canonical_tensors;
use moesaic_weights::write_safetensors;
use std::path::Path;

/// A spec with top-2 of four experts, and tokens of eight numbers.
pub const SPEC: &str = "shape = { model_dim = 8, hidden_dim = 16, experts = 4, top_k = 2 }";

/// Returns the layer of [`SPEC`].
pub fn spec() -> LayerSpec {
    LayerSpec::from_toml(SPEC).expect("it is valid")
}

/// Returns made-up weights for the layer.
pub fn weights() -> Tensors<'static> {
    let mut weights = Tensors::new();
    for tensor in canonical_tensors(&spec()) {
        let values = wave(tensor.shape.iter().product());
        weights.insert(tensor.name, Tensor::owned(&tensor.shape, values));
    }
    weights
}

/// Opens an engine for the baseline instruction set, which every CPU runs.
pub fn engine() -> Engine {
    Engine::open("cpu:portable", Default::default()).expect("a C compiler is here")
}

/// Returns `elements` numbers of a sine wave.
pub fn wave(elements: usize) -> Vec<f32> {
    (0..elements).map(|i| (i as f32 * 0.7).sin()).collect()
}

/// Writes the folder of a Mixtral with two layers, in the form of transformers.
///
/// # Errors
/// The folder cannot be written.
pub fn write_model(folder: &Path) -> Result<(), Error> {
    let config = r#"{ "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 64,
        "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2,
        "torch_dtype": "float32" }"#;
    let path = folder.join("config.json");
    let written = std::fs::write(&path, config);
    written.map_err(|source| Error::Io { path, source })?;
    let mut tensors = Tensors::new();
    let mut add = |name: String, shape: [usize; 2]| {
        let values = wave(shape.iter().product());
        tensors.insert(name, Tensor::owned(&shape, values));
    };
    for layer in 0..2 {
        let block = format!("model.layers.{layer}.block_sparse_moe");
        add(format!("{block}.gate.weight"), [4, 32]);
        for expert in 0..4 {
            let expert = format!("{block}.experts.{expert}");
            add(format!("{expert}.w1.weight"), [64, 32]);
            add(format!("{expert}.w2.weight"), [32, 64]);
            add(format!("{expert}.w3.weight"), [64, 32]);
        }
    }
    Ok(write_safetensors(
        folder.join("model.safetensors"),
        &tensors,
    )?)
}
