//! Several routers over one set of experts in one pass: the steps of a router, and the layer that
//! takes the tokens of all.

use super::{LayerPlan, Step};
use crate::Op;
use moesaic_spec::{CapacityMode, Chooser, LayerSpec};

/// Returns the experts of a spec as a layer whose ids come from outside: its tokens are those of
/// one router, then those of the next. `None` if a call of all routers differs from a call of each:
/// with a capacity, with decisions of the caller, with a latent projection, and with a norm of
/// outputs.
pub fn stacked(spec: &LayerSpec) -> Option<LayerSpec> {
    let mode = spec.capacity.mode;
    let drops = !matches!(mode, CapacityMode::Dropless | CapacityMode::MaxCount);
    let rescales = spec.capacity.renormalize_after_drop;
    let external = spec.router.kind.chooser() == Chooser::Caller;
    let normed = spec.experts.output_norm_eps.is_some();
    if drops || rescales || external || normed || spec.latent.is_some() {
        return None;
    }
    Some(spec.decided_elsewhere())
}

impl LayerPlan {
    /// Returns the steps of the router in a forward pass: where tokens go, and losses.
    pub fn router_steps<'s>(&self, steps: &'s [Step]) -> &'s [Step] {
        let own = |step: &Step| self.op(step).is_some_and(Op::of_router);
        let count = steps.iter().take_while(|step| own(step)).count();
        &steps[..count]
    }

    /// Returns the steps of a forward pass from expert outputs to `y`, or all others.
    pub fn combine_steps(&self, steps: &[Step], sums: bool) -> Vec<Step> {
        let wanted = |step: &&Step| self.sums_tokens(step) == sums;
        steps.iter().filter(wanted).cloned().collect()
    }

    /// Returns the steps of a backward pass from the gradients of a router's weights and of expert
    /// rows to those of the router and of tokens.
    pub fn router_backward(&self) -> Vec<Step> {
        let of_router = |name: &str| name.trim_start_matches("grad.").starts_with("router.");
        // By the tensors' names, because gradients of the router's matrix are GEMMs like those of
        // experts.
        let own = |step: &&Step| self.sums_tokens(step) || self.names(step).any(of_router);
        self.backward.iter().filter(own).cloned().collect()
    }

    /// Returns the steps of a backward pass up to the gradients of expert rows, where the router is
    /// the caller's.
    pub fn experts_backward(&self) -> Vec<Step> {
        let own = |step: &&Step| !self.sums_tokens(step);
        self.backward.iter().filter(own).cloned().collect()
    }

    fn sums_tokens(&self, step: &Step) -> bool {
        self.op(step).is_some_and(Op::sums_tokens)
    }
}
