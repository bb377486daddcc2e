//! The forward passes of a layer: the launches of each, what it takes and what
//! may be read after it.

use crate::memory::tensors;
use moesaic_plan::{LayerPlan, Step, TensorId, TensorRole};
use std::collections::BTreeSet;

/// A forward pass of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// All of it; draws nothing and keeps nothing.
    Evaluate,
    /// All of it; draws random numbers and keeps what backward needs.
    Train,
    /// Decides where tokens go, as in evaluation.
    Route,
    /// Decides where tokens go, as in training.
    RouteTrain,
}

/// The tensors that a pass exchanges with its caller.
pub(crate) struct Ports {
    pub inputs: Vec<TensorId>,
    pub outputs: Vec<TensorId>,
}

impl Pass {
    /// Each at its number.
    pub const ALL: [Pass; 4] = [Pass::Evaluate, Pass::Train, Pass::Route, Pass::RouteTrain];

    /// Returns whether the pass draws random numbers.
    pub fn trains(self) -> bool {
        matches!(self, Pass::Train | Pass::RouteTrain)
    }

    pub fn steps(self, plan: &LayerPlan) -> &[Step] {
        match self {
            Pass::Evaluate => plan.evaluation_steps(),
            Pass::Train => &plan.steps,
            Pass::Route => plan.routing_of(plan.evaluation_steps()),
            Pass::RouteTrain => plan.routing_of(&plan.steps),
        }
    }

    pub fn ports(self, plan: &LayerPlan) -> Ports {
        let mut named = tensors(self.steps(plan));
        // Backward gets no inputs but `dy`, so an input that it reads again has to be kept by the
        // forward call.
        if self == Pass::Train {
            named.extend(tensors(&plan.backward));
        }
        let inputs = of_role(plan, &named, &[TensorRole::Input]);
        // A routing call also returns the weights of the caller's own decision, if asked for them.
        named.extend(plan.id("topk_weights"));
        let outputs = of_role(plan, &named, &[TensorRole::Input, TensorRole::Output]);
        Ports { inputs, outputs }
    }
}

/// The named tensors that have one of these roles.
fn of_role(plan: &LayerPlan, named: &BTreeSet<TensorId>, roles: &[TensorRole]) -> Vec<TensorId> {
    let named = named.iter().copied();
    named.filter(|&id| roles.contains(&plan[id].role)).collect()
}

/// The tensors that training keeps and that other passes need for themselves.
pub(crate) fn passing(plan: &LayerPlan) -> Vec<TensorId> {
    let mut named = tensors(plan.evaluation_steps());
    named.extend(tensors(Pass::RouteTrain.steps(plan)));
    let kept = plan.saved().into_iter();
    kept.filter(|tensor| named.contains(tensor)).collect()
}
