//! Shared experts, as the kernels that sum over experts see them.

use crate::layer::Builder;
use moesaic_spec::{LayerSpec, SharedExpert, SharedGate};
use serde::{Deserialize, Serialize};

/// A shared expert as the sum of a forward pass sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedDesc {
    /// Its output is multiplied by σ of its logit.
    pub gated: bool,
    /// With a residual gate, the index of its logit in a pair: the softmax of the pair is its
    /// weight.
    pub of_pair: Option<usize>,
}

/// Returns the shared experts of a forward pass.
pub(super) fn shared(shared: &[SharedExpert]) -> Vec<SharedDesc> {
    let of = |shared: &SharedExpert| SharedDesc {
        gated: shared.gate != SharedGate::None,
        of_pair: (shared.gate == SharedGate::Residual).then_some(1),
    };
    shared.iter().map(of).collect()
}

/// A shared expert as the first and the last kernels of a backward pass see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedBwdDesc {
    /// Its output is multiplied by σ of its logit.
    pub gated: bool,
    /// With a residual gate: the softmax of two logits weights the routed experts' sum by its first
    /// value, and this expert's output by its second.
    pub residual: bool,
    /// Its output has a bias, which a gate weights too.
    pub bias: bool,
    /// Columns of its parts of the weight's gradient.
    pub parts: usize,
}

impl SharedBwdDesc {
    /// Returns the logits of a token, where there is a gate.
    pub fn logits(&self) -> usize {
        if self.residual { 2 } else { 1 }
    }
}

/// Returns the shared experts of a backward pass, each with the columns of its parts.
pub(super) fn shared_bwd(spec: &LayerSpec, parts: &[usize]) -> Vec<SharedBwdDesc> {
    // Callers pass no parts where another kernel adds the shared experts (`adds_later`), so that
    // `zip` leaves none here.
    let list = spec.shared.iter().zip(parts).enumerate();
    list.map(|(index, (shared, &parts))| SharedBwdDesc {
        gated: shared.gate != SharedGate::None,
        residual: shared.gate == SharedGate::Residual,
        bias: spec.shared_bias(index).down(),
        parts,
    })
    .collect()
}

/// Returns whether a projection or a weight lies between the sum of the routed experts and the
/// shared ones.
pub(super) fn apart(spec: &LayerSpec) -> bool {
    spec.latent.is_some() || spec.residual().is_some()
}

/// Returns whether the sum of the routed experts is a tensor of its own, to which another kernel
/// adds shared experts.
pub(super) fn adds_later(spec: &LayerSpec) -> bool {
    apart(spec) && !spec.shared.is_empty()
}

impl Builder {
    /// Returns the parameters of the forward sum that belong to shared experts, the first of which
    /// is the parameters' `first`.
    pub(super) fn shared_outputs(&self, first: usize) -> Vec<(String, String)> {
        let parts = [("out", "out"), ("logit", "router.logits")];
        let indices = 0..self.plan.spec.shared.len();
        let names = indices.flat_map(|i| {
            let at = first + i;
            parts.map(|(from, to)| (format!("shared_{at}_{from}"), format!("shared.{i}.{to}")))
        });
        names.collect()
    }

    /// Returns the parameters of those kernels of a backward pass that belong to shared experts,
    /// the first of which is the parameters' `first`.
    pub(super) fn shared_names(&self, first: usize) -> Vec<(String, String)> {
        let parts = [
            ("logit", "router.logits"),
            ("weight", "weight"),
            ("parts", "dweight_parts"),
            ("down_bias", "down.bias"),
            ("dlogit", "dlogit"),
            ("drows", "drows"),
            ("router", "router.weight"),
        ];
        let indices = 0..self.plan.spec.shared.len();
        let names = indices.flat_map(|i| {
            let at = first + i;
            parts.map(|(from, to)| (format!("shared_{at}_{from}"), format!("shared.{i}.{to}")))
        });
        names.collect()
    }
}
