//! A layer whose routed experts are the caller's code: the plan has everything but their GEMMs, and
//! two places where the caller takes over.

use super::{Builder, LayerPlan, PlanOptions, Recompute};
use crate::PlanError;
use moesaic_kernel::Target;
use moesaic_spec::{Biases, LayerSpec, WeightSite};

/// The plan of such a layer; it names no weight of a routed expert.
#[derive(Clone, Debug, PartialEq)]
pub struct UserPlan {
    /// The kernels, tensors and launches.
    pub layer: LayerPlan,
    /// Before this step of the forward pass the caller turns `rows` into `out`.
    pub forward_at: usize,
    /// The same of [`LayerPlan::evaluation_steps`].
    pub evaluation_at: usize,
    /// Before this step of the backward pass the caller turns `dout`, the
    /// gradient of what was added to each token, into `drows` and column 0 of
    /// `dweight_parts`. Where outputs are normalised, `dout` is that of `out`,
    /// and there is no `dweight_parts`.
    pub backward_at: usize,
}

/// Plans a layer around experts that are the caller's. `hidden_dim`, form and
/// activation of the spec mean nothing for them, only for shared experts.
///
/// # Errors
/// [`PlanError::Unsupported`] for biases of experts and
/// `weight_on = "activation"`, which are inside them.
pub fn plan_user_experts(
    spec: &LayerSpec,
    target: Target,
    options: &PlanOptions,
) -> Result<UserPlan, PlanError> {
    check(spec)?;
    let mut builder = Builder::new(spec, target, options);
    // What the caller's experts read again is theirs to keep.
    let at = builder.around_experts(Recompute::None);
    builder.forget_experts();
    Ok(UserPlan {
        layer: builder.finish(),
        forward_at: at.forward,
        evaluation_at: at.evaluation,
        backward_at: at.backward,
    })
}

fn check(spec: &LayerSpec) -> Result<(), PlanError> {
    // Both act inside an expert, between its GEMMs or behind the last, where the caller's code
    // runs.
    let (option, advice) = if spec.experts.bias != Biases::None {
        (
            "experts.bias",
            "remove it: experts add their biases themselves",
        )
    } else if spec.router.weight_on == WeightSite::Activation {
        ("router.weight_on", "use weight_on = \"output\"")
    } else {
        return Ok(());
    };
    Err(PlanError::Unsupported { option, advice })
}
