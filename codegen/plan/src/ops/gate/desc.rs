//! What `gate_topk` computes: projecting, selecting and weighing, and what
//! training does beyond that.

use moesaic_kernel::DType;
use moesaic_spec::{
    CapacityOrder, LayerSpec, Loss, LossKind, NoiseKind, Router, RouterKind, Select, SharedGate,
};
use serde::{Deserialize, Serialize};

/// How logits come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Logits {
    /// There are none: the table decides and every weight is one.
    None,
    /// `x · Wᵀ (+ b)`.
    Linear,
    /// Cosine similarity after a projection of this width.
    Cosine(usize),
}

/// `gate_topk`: x `[T, d]` to ids and weights `[T, K]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateTopkDesc {
    /// d.
    pub model_dim: usize,
    /// Experts the router scores, identity experts included.
    pub experts: usize,
    /// K.
    pub top_k: usize,
    /// Element type of x.
    pub activations: DType,
    /// Where logits come from.
    pub logits: Logits,
    /// The router as the spec says it, training noise removed.
    pub router: Router,
    /// Whether ids and weights are computed; a shared expert's gate needs
    /// only logits.
    pub select: bool,
    /// Whether the best score of each token is written, for
    /// batch-prioritised capacity.
    pub best_score: bool,
    /// The order in which the scan takes what is selected here.
    pub order: CapacityOrder,
    /// Noise, jitter and what else only training does.
    pub training: bool,
    /// Whether a loss has a gradient by the scale of learned noise itself.
    pub scale_loss: bool,
}

/// The gate of the routed experts; absent when routing comes from outside.
pub(crate) fn gate_topk(spec: &LayerSpec, training: bool) -> Option<GateTopkDesc> {
    let logits = match (spec.router.kind, spec.has_logits()) {
        (RouterKind::External, _) => return None,
        (_, false) => Logits::None,
        (RouterKind::Cosine, _) => Logits::Cosine(spec.router.projection_dim.unwrap_or(1)),
        _ => Logits::Linear,
    };
    // Where training does nothing more, its gate is that of evaluation.
    let serving = serving(&spec.router);
    let training = training && serving != spec.router;
    Some(GateTopkDesc {
        model_dim: spec.shape.model_dim,
        experts: spec.routed_experts(),
        top_k: spec.shape.top_k,
        activations: spec.precision.activations,
        logits,
        router: match training {
            true => spec.router.clone(),
            false => serving,
        },
        select: true,
        best_score: needs_order(spec),
        order: spec.capacity.order,
        training,
        scale_loss: training && scale_loss(spec),
    })
}

/// The gate of a shared expert: one logit, or two and a bias.
pub(crate) fn shared_gate(spec: &LayerSpec, index: usize) -> GateTopkDesc {
    let pair = spec.shared[index].gate == SharedGate::Residual;
    GateTopkDesc {
        model_dim: spec.shape.model_dim,
        experts: spec.shared[index].gate.logits(),
        top_k: 1,
        activations: spec.precision.activations,
        logits: Logits::Linear,
        router: Router {
            bias: pair,
            ..Router::default()
        },
        select: false,
        best_score: false,
        order: CapacityOrder::SlotMajor,
        training: false,
        scale_loss: false,
    }
}

/// Whether tokens are placed in the order of their best score.
fn needs_order(spec: &LayerSpec) -> bool {
    spec.capacity.order == CapacityOrder::BatchPrioritized
}

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
fn serving(router: &Router) -> Router {
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
fn scale_loss(spec: &LayerSpec) -> bool {
    let by_chance = |loss: &Loss| loss.kind == LossKind::ImportanceLoadLogits;
    spec.learned_noise() && spec.losses.iter().any(by_chance)
}

/// The projection behind the scale of learned noise.
pub(crate) fn noise_gate(spec: &LayerSpec) -> Option<GateTopkDesc> {
    let gate = gate_topk(spec, true)?;
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
