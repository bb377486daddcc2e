//! Passes around experts that are elsewhere: in the caller's code, or on other ranks.

use super::builder::{Part, Pass};
use super::{Builder, Recompute};
use crate::ops::Calls;

/// The number of the first step of each pass that comes after the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Places {
    pub forward: usize,
    pub evaluation: usize,
    pub backward: usize,
}

impl Builder {
    /// Adds every pass without the routed experts, and returns where they belong in each.
    pub(crate) fn around_experts(&mut self, recompute: Recompute) -> Places {
        let forward = self.forward_around();
        let mut places = Places {
            forward,
            // Without training, `steps` is the evaluation.
            evaluation: forward,
            backward: 0,
        };
        if self.plan.training.is_some() {
            self.pass = Pass::Backward;
            self.recompute(recompute);
            places.backward = self.backward_around();
            self.pass = Pass::Evaluation;
            places.evaluation = self.forward_around();
        }
        places
    }

    /// Adds the evaluation of experts alone, in a layer that trains.
    pub(crate) fn evaluation_of_experts(&mut self) {
        self.pass = Pass::Evaluation;
        self.experts();
    }

    /// Adds every pass of shared experts alone, whose gates are elsewhere.
    pub(crate) fn shared_alone(&mut self, recompute: Option<Recompute>) {
        self.every_shared(Self::shared_gemms);
        let Some(recompute) = recompute else {
            return;
        };
        self.pass = Pass::Backward;
        let columns = self.shared_parts();
        self.declare_shared_parts(&columns);
        self.shared_again(recompute);
        self.every_shared(|builder, index| builder.expert_bwd(Some(index), &mut true));
        self.pass = Pass::Evaluation;
        self.every_shared(Self::shared_gemms);
    }

    /// Drops the tensors that no step names, weights too.
    pub(crate) fn forget_unnamed(&mut self) {
        let named = self.named_tensors();
        self.plan
            .tensors
            .retain(|tensor| named.contains(&tensor.name));
    }

    /// Drops the tensors of experts that are elsewhere and that no step names, weights too.
    pub(crate) fn forget_experts(&mut self) {
        let named = self.named_tensors();
        let sharded = self.sharded.is_some();
        // Some are named all the same: `combine_bwd_weights` reads the last bias of experts on
        // other ranks for the gradient of their weights.
        let of_expert = |name: &str| {
            let name = name.trim_start_matches("grad.");
            name.starts_with("experts.") || sharded && name.starts_with("shared.")
        };
        let tensors = &mut self.plan.tensors;
        tensors.retain(|tensor| !of_expert(&tensor.name) || named.contains(&tensor.name));
    }

    /// Returns whether the experts are on other ranks.
    pub(super) fn is_around(&self) -> bool {
        matches!(self.part, Part::Tokens { .. })
    }

    /// Adds the forward pass without the routed experts, and returns where they belong. It always
    /// copies rows, whatever the target's own GEMMs would read.
    fn forward_around(&mut self) -> usize {
        self.routing();
        self.latent_down();
        self.dispatch(Calls::All);
        // Every step so far makes what the experts read, and no step below does.
        let at = match self.pass {
            Pass::Evaluation => self.plan.evaluation.len(),
            _ => self.plan.steps.len(),
        };
        self.every_shared(match self.sharded {
            Some(_) => Self::shared_gate,
            None => Self::shared,
        });
        self.combine();
        at
    }

    /// Adds the backward pass without the routed experts, and returns where they belong.
    fn backward_around(&mut self) -> usize {
        // The place of the experts is between the two halves of `combine_bwd`: they read the `dout`
        // of the first, and the second reads their `dweight_parts`.
        let combine = self.combine_bwd();
        let at = self.plan.backward.len();
        self.shared_bwd(&combine);
        self.gate_bwd();
        self.dispatch_bwd();
        at
    }
}
