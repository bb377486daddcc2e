//! The layer used by the examples in this crate's documentation.

use crate::{Engine, LayerSpec, Tensor, Tensors};
use moesaic_spec::canonical_tensors;

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
