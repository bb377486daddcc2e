//! The tensors that only a plan of training has.

use moesaic_spec::{LayerSpec, NoiseKind};

/// Returns whether only a training plan has the tensor.
pub(super) fn training_only(spec: &LayerSpec, name: &str) -> bool {
    spec.router.noise_kind == NoiseKind::Learned && name == "router.noise.weight"
}
