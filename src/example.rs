//! The layer that the examples of these pages use.

use crate::{Engine, LayerSpec, Tensor, Tensors};
use moesaic_spec::canonical_tensors;

/// Two of four experts, tokens of eight numbers.
pub const SPEC: &str = "shape = { model_dim = 8, hidden_dim = 16, experts = 4, top_k = 2 }";

/// The layer of [`SPEC`].
pub fn spec() -> LayerSpec {
    LayerSpec::from_toml(SPEC).expect("it is valid")
}

/// Some weights for the layer.
pub fn weights() -> Tensors<'static> {
    let mut weights = Tensors::new();
    for tensor in canonical_tensors(&spec()) {
        let values = wave(tensor.shape.iter().product());
        weights.insert(tensor.name, Tensor::owned(&tensor.shape, values));
    }
    weights
}

/// An engine with the plainest kernels, which every CPU runs.
pub fn engine() -> Engine {
    Engine::open("cpu:portable", Default::default()).expect("a C compiler is here")
}

/// So many numbers.
pub fn wave(elements: usize) -> Vec<f32> {
    (0..elements).map(|i| (i as f32 * 0.7).sin()).collect()
}
