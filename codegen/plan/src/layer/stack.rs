//! Several routers over one set of experts in one pass over these: what of
//! a plan is a router's own, and the layer that takes the tokens of all.

use super::{LayerPlan, Step};
use crate::Op;
use moesaic_spec::{CapacityMode, LayerSpec, RouterKind};

/// The experts of a spec as a layer that is told where tokens go: its tokens are
/// those of one router, then those of the next. `None` where a call of all routers
/// is not the same as a call of each, since experts have so much room in each,
/// where the decisions are the caller's, and with a latent projection.
pub fn stacked(spec: &LayerSpec) -> Option<LayerSpec> {
    let mode = spec.capacity.mode;
    let drops = !matches!(mode, CapacityMode::Dropless | CapacityMode::MaxCount);
    let rescales = spec.capacity.renormalize_after_drop;
    let external = spec.router.kind == RouterKind::External;
    if drops || rescales || external || spec.latent.is_some() {
        return None;
    }
    Some(spec.decided_elsewhere())
}

impl LayerPlan {
    /// Of a forward pass's steps those of the router: where tokens go, and losses.
    pub fn router_steps<'s>(&self, steps: &'s [Step]) -> &'s [Step] {
        let own = |step: &Step| self.op(step).is_some_and(Op::of_router);
        let count = steps.iter().take_while(|step| own(step)).count();
        &steps[..count]
    }

    /// Of a forward pass's steps those from what experts gave to `y`, or all others.
    pub fn combine_steps(&self, steps: &[Step], sums: bool) -> Vec<Step> {
        let wanted = |step: &&Step| self.sums_tokens(step) == sums;
        steps.iter().filter(wanted).cloned().collect()
    }

    /// The steps of a backward pass from the gradients of a router's weights
    /// and of expert rows to those of the router and of tokens.
    pub fn router_backward(&self) -> Vec<Step> {
        let of_router = |name: &str| name.trim_start_matches("grad.").starts_with("router.");
        let own = |step: &&Step| self.sums_tokens(step) || self.names(step).any(of_router);
        self.backward.iter().filter(own).cloned().collect()
    }

    /// The steps of a backward pass up to the gradients of expert rows, where
    /// the router is the caller's.
    pub fn experts_backward(&self) -> Vec<Step> {
        let own = |step: &&Step| !self.sums_tokens(step);
        self.backward.iter().filter(own).cloned().collect()
    }

    fn sums_tokens(&self, step: &Step) -> bool {
        self.op(step).is_some_and(Op::sums_tokens)
    }
}
