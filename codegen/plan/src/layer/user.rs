//! A layer whose routed experts are the caller's code: everything but their
//! products is planned, and there are two places where the caller takes over.

use super::builder::Pass;
use super::{Builder, LayerPlan, PlanOptions};
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
    /// `dweight_parts`.
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
    let forward_at = builder.forward_around();
    let (mut evaluation_at, mut backward_at) = (forward_at, 0);
    if options.training.is_some() {
        backward_at = builder.backward_around();
        builder.pass = Pass::Evaluation;
        evaluation_at = builder.forward_around();
    }
    let of_expert = |name: &str| name.trim_start_matches("grad.").starts_with("experts.");
    let tensors = &mut builder.plan.tensors;
    tensors.retain(|tensor| !of_expert(&tensor.name));
    Ok(UserPlan {
        layer: builder.finish(),
        forward_at,
        evaluation_at,
        backward_at,
    })
}

fn check(spec: &LayerSpec) -> Result<(), PlanError> {
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

impl Builder {
    /// The forward pass without the routed experts; where they belong. Rows
    /// are always copied, whatever the target's own products would read.
    fn forward_around(&mut self) -> usize {
        self.routing();
        self.latent_down();
        self.dispatch();
        let at = match self.pass {
            Pass::Evaluation => self.plan.evaluation.len(),
            _ => self.plan.steps.len(),
        };
        for index in 0..self.plan.spec.shared.len() {
            self.shared(index);
        }
        self.combine();
        at
    }
}
