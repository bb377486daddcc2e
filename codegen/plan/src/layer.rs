//! A plan of a whole pass: kernels, tensors, and the steps in order.

pub(crate) mod around;
mod backward;
mod builder;
mod data;
mod declared;
mod stack;
mod step;
mod supported;
mod tensor;
mod user;

use crate::{PlanError, TileMachine};
use moesaic_kernel::Target;
use moesaic_spec::LayerSpec;

pub(crate) use builder::{Bind, Builder, Part, borrowed, owned};
pub(crate) use tensor::{constant, tensor};

use builder::Pass;

pub use data::{LayerPlan, PlanOptions, Recompute, Training};
pub use stack::stacked;
pub use step::{EntryId, LaunchStep, Step, TensorId};
pub use tensor::{TensorPlan, TensorRole};
pub use user::{UserPlan, plan_user_experts};

/// Plans a layer for a target. The spec must be valid. With training options its steps also draw
/// noise, compute losses and keep what backward needs, and evaluation has steps of its own.
///
/// # Errors
///
/// [`PlanError::QuantizedActivations`].
pub fn plan(
    spec: &LayerSpec,
    target: Target,
    options: &PlanOptions,
) -> Result<LayerPlan, PlanError> {
    check_row_format(spec, target, options)?;
    let mut builder = Builder::new(spec, target, options);
    builder.forward();
    if let Some(training) = options.training {
        builder.backward(training.recompute);
        // Last, so that it finds the kernels of training that it can share.
        builder.evaluation();
    }
    Ok(builder.finish())
}

/// Refuses quantized activations on GPUs, which have no kernels for them, and in training, because
/// rounding has no gradient.
pub(crate) fn check_row_format(
    spec: &LayerSpec,
    target: Target,
    options: &PlanOptions,
) -> Result<(), PlanError> {
    let Some(format) = spec.precision.expert_activations else {
        return Ok(());
    };
    let reason = match (TileMachine::of(target, options.caches), options.training) {
        (TileMachine::Gpu(_), _) => format!("is for CPUs, and `{target}` has no kernels for it"),
        (TileMachine::Cpu(_), Some(_)) => "has no gradients: rounding has none".to_string(),
        (TileMachine::Cpu(_), None) => return Ok(()),
    };
    Err(PlanError::QuantizedActivations { format, reason })
}

impl Builder {
    /// Adds a forward pass with the layer's own experts.
    fn forward(&mut self) {
        // Shared experts come after routed ones, whose launches may run the first shared expert
        // too: `expert_gemm` then adds no step for it.
        self.routing();
        self.experts();
        self.every_shared(Self::shared);
        self.combine();
    }

    /// Calls `act` for each shared expert.
    fn every_shared(&mut self, act: impl Fn(&mut Builder, usize)) {
        for index in 0..self.plan.spec.shared.len() {
            act(self, index);
        }
    }

    /// Adds the forward pass once more, without what only training does. Both passes share equal
    /// kernels.
    fn evaluation(&mut self) {
        self.pass = Pass::Evaluation;
        self.forward();
    }

    /// Adds gate, scan, and losses, the steps before the experts.
    fn routing(&mut self) {
        let routed = self.gate();
        self.scan(routed);
        // Behind the scan, because `LayerPlan::routing_of` takes the leading steps that route, and
        // a loss is none of them.
        if self.trains() {
            self.losses();
        }
    }

    /// Returns whether the forward pass keeps the pre-activations.
    pub(crate) fn keeps_hidden(&self) -> bool {
        let recompute = self.plan.training.map(|training| training.recompute);
        // The two recomputing modes run `up` again in backward, so forward would write two tensors
        // of `[rows, hidden]` for nothing.
        self.trains() && recompute == Some(Recompute::None)
    }
}

#[cfg(test)]
mod tests;
