//! What a gate does beyond projecting, selecting and weighing.

use super::{GateTopkDesc, Logits};
use moesaic_spec::{LayerSpec, Loss, LossKind, NoiseKind, Router, Select};

impl GateTopkDesc {
    /// Whether the router reads tokens that were jittered or had channels
    /// dropped.
    pub fn draws_input(&self) -> bool {
        let r = &self.router;
        self.training && self.logits != Logits::None && (r.jitter > 0.0 || r.input_dropout > 0.0)
    }

    /// Whether noise is added to the logits themselves.
    pub fn noisy(&self) -> bool {
        use NoiseKind::{Gaussian, Learned};
        let r = &self.router;
        let kind = matches!(r.noise_kind, Gaussian | Learned);
        self.training && self.logits != Logits::None && r.noise > 0.0 && kind
    }

    /// Whether the scale of that noise is learned.
    pub fn learned_noise(&self) -> bool {
        self.noisy() && self.router.noise_kind == NoiseKind::Learned
    }

    /// Whether selection draws random numbers.
    pub fn draws_selection(&self) -> bool {
        let r = &self.router;
        let keys = r.noise > 0.0 && !self.noisy() && self.logits != Logits::None;
        self.training && self.select && (keys || r.random_second)
    }

    /// The tokens per expert, times T / E, of an expert choice.
    pub fn expert_choice(&self) -> Option<f64> {
        match self.router.select {
            Select::ExpertChoice(share) if self.select => Some(share),
            _ => None,
        }
    }

    /// The rounds of Sinkhorn's iteration.
    pub fn sinkhorn(&self) -> Option<usize> {
        match self.router.select {
            Select::Sinkhorn(rounds) if self.select && self.training => Some(rounds),
            _ => None,
        }
    }
}

/// The router without what only training does.
pub(super) fn serving(router: &Router) -> Router {
    Router {
        jitter: 0.0,
        input_dropout: 0.0,
        noise: 0.0,
        noise_kind: NoiseKind::default(),
        random_second: false,
        select: match router.select {
            Select::Sinkhorn(_) => Select::TopK,
            other => other,
        },
        ..router.clone()
    }
}

/// Whether a loss is a function of the scale of learned noise: the chance to
/// be chosen is.
pub(super) fn scale_loss(spec: &LayerSpec) -> bool {
    let by_chance = |loss: &Loss| loss.kind == LossKind::ImportanceLoadLogits;
    spec.learned_noise() && spec.losses.iter().any(by_chance)
}

/// The projection behind the scale of learned noise.
pub(crate) fn noise_gate(spec: &LayerSpec) -> Option<GateTopkDesc> {
    let gate = super::gate_topk(spec, true)?;
    gate.learned_noise().then(|| GateTopkDesc {
        logits: Logits::Linear,
        router: Router {
            input: spec.router.input,
            ..Router::default()
        },
        select: false,
        best_score: false,
        training: false,
        scale_loss: false,
        ..gate
    })
}
