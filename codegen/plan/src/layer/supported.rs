//! Options that no kernel computes yet.

use crate::PlanError;
use moesaic_kernel::Target;
use moesaic_spec::{LayerSpec, NoiseKind, Select};

/// Refuses what the target's kernels would silently leave out.
pub(super) fn check(spec: &LayerSpec, target: Target) -> Result<(), PlanError> {
    let r = &spec.router;
    let choice = matches!(r.select, Select::ExpertChoice(_));
    let missing = [
        ("router.select = { expert-choice }", choice),
        ("router.token_mask", r.token_mask),
        ("router.active_k", r.active_k),
        ("router.entropy", r.entropy.is_some()),
    ];
    match missing.into_iter().find(|(_, set)| *set) {
        None => Ok(()),
        Some((option, _)) => Err(PlanError::Unsupported {
            option: option.to_string(),
            target: target.to_string(),
            advice: "the f64 reference computes it; leave it out to run the layer".to_string(),
        }),
    }
}

/// Whether only a training plan has the tensor.
pub(super) fn training_only(spec: &LayerSpec, name: &str) -> bool {
    spec.router.noise_kind == NoiseKind::Learned && name == "router.noise.weight"
}
