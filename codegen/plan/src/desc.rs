//! What each kernel computes. A desc holds every data-independent size and
//! option that is baked into the text, and nothing about tiling or targets.

mod backward;
mod gate_bwd;
mod routing;

pub use backward::{
    CombineBwdDesc, DispatchBwdDesc, GroupedGemmDgradDesc, GroupedGemmWgradDesc, SharedBwdDesc,
};
pub(crate) use backward::{
    combine_bwd, combine_bwd_later, dispatch_bwd, dispatch_bwd_later, grouped_gemm_dgrad,
    grouped_gemm_wgrad, latent_dgrad, latent_wgrad, router_dgrad, router_wgrad, shared_dgrad,
    shared_gate_wgrad, shared_wgrad,
};
pub(crate) use gate_bwd::gate_topk_bwd;
pub use gate_bwd::{GateTopkBwdDesc, LossSlope, LossSum};

pub(crate) use routing::noise_gate;

use crate::config::GroupedGemmConfig;
use moesaic_kernel::DType;
use moesaic_spec::{
    Activation, Biases, Capacity, CapacityOrder, ExpertForm, LayerSpec, Router, RouterKind,
    SharedExpert, SharedGate, WeightSite,
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

/// `expert_scan`: ids `[T, K]` to counts, offsets, locations and maps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertScanDesc {
    /// Experts with rows.
    pub experts: usize,
    /// Experts that are counted, identity experts included.
    pub routed_experts: usize,
    /// K.
    pub top_k: usize,
    /// The capacity rule.
    pub capacity: Capacity,
    /// The router's scale, which renormalisation after dropping restores.
    pub scale: f64,
    /// Ids come from the caller, not from a `gate_topk` of the layer.
    pub external: bool,
    /// Renormalising keeps the sums that it divided by, for backward.
    pub keep_sums: bool,
    /// The random order is another in each call, as in training.
    pub drawn: bool,
}

/// `dispatch`: x `[T, d]` to rows `[R, d]`, ordered by expert.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DispatchDesc {
    /// d.
    pub model_dim: usize,
    /// Experts with rows.
    pub experts: usize,
    /// K.
    pub top_k: usize,
    /// Element type of x and of the rows.
    pub activations: DType,
    /// Whether rows are multiplied by their weight.
    pub weighted: bool,
}

/// Which product of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Half {
    /// `a = φ(rows · gateᵀ) ⊙ (rows · upᵀ)`, or `φ(rows · upᵀ)`.
    Up,
    /// `a · downᵀ`.
    Down,
}

impl Half {
    /// `up` or `down`.
    pub fn name(self) -> &'static str {
        match self {
            Half::Up => "up",
            Half::Down => "down",
        }
    }
}

/// `grouped_gemm`: rows `[R, inner]` times each expert's `[outer, inner]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupedGemmDesc {
    /// Which product.
    pub half: Half,
    /// Groups of rows, each with its own matrix.
    pub experts: usize,
    /// Rows are all tokens and there is one matrix: a shared expert.
    pub dense: bool,
    /// K; 1 when dense.
    pub top_k: usize,
    /// Width of a row, summed over.
    pub inner: usize,
    /// Width of an output row.
    pub outer: usize,
    /// Two matrices, gate and up.
    pub gated: bool,
    /// φ of the up half.
    pub activation: Activation,
    /// See [`moesaic_spec::Experts`].
    pub alpha: f64,
    /// See [`moesaic_spec::Experts`].
    pub clamp: Option<f64>,
    /// See [`moesaic_spec::Experts`].
    pub up_offset: f64,
    /// Whether biases are added.
    pub bias: bool,
    /// Up: the activation is multiplied by the row's weight. Down: the bias is.
    pub weighted: bool,
    /// Up: rows are tokens as they are, so that they can be read from x.
    pub plain_rows: bool,
    /// Element type of the matrices and biases.
    pub weights: DType,
    /// Element type of rows and output.
    pub activations: DType,
    /// f32 factors may be rounded to TF32.
    pub tf32: bool,
    /// Up: what enters the activation is kept for backward, biases included,
    /// before any clamp.
    pub keep: bool,
}

/// Elements that the depth of packed weights is a multiple of: what one
/// product of tiles takes.
const PACKED_DEPTH: usize = 32;

impl GroupedGemmDesc {
    /// The packed weights of a config: experts, strips, depth, and the columns
    /// of a strip, those of gate before those of up.
    pub fn packed_shape(&self, config: &GroupedGemmConfig) -> [usize; 4] {
        [
            self.experts,
            self.outer.div_ceil(config.thread_columns),
            self.inner.next_multiple_of(PACKED_DEPTH),
            config.thread_columns * self.matrices(),
        ]
    }

    /// Matrices of an expert: gate and up, or one.
    pub fn matrices(&self) -> usize {
        if self.gated { 2 } else { 1 }
    }
}

/// A shared expert as `combine` sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedDesc {
    /// Its output is multiplied by σ of its logit.
    pub gated: bool,
    /// With a gate: there are two logits, this one's is that with this index,
    /// and the weight is the softmax of both.
    pub of_pair: Option<usize>,
}

/// `combine`: expert rows `[R, d_out]` to y `[T, d_out]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CombineDesc {
    /// d_out.
    pub output_dim: usize,
    /// Experts with rows; ids from here on are identity experts.
    pub experts: usize,
    /// Identity experts, which add `weight · x`.
    pub identity: usize,
    /// Zero experts, with the ids after those.
    pub zero: usize,
    /// K; 0 where only shared experts are added.
    pub top_k: usize,
    /// Element type of rows, x and y.
    pub activations: DType,
    /// Whether rows are multiplied by their weight here.
    pub weighted: bool,
    /// Shared experts, added with f32 weights.
    pub shared: Vec<SharedDesc>,
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
    let serving = routing::serving(&spec.router);
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
        scale_loss: training && routing::scale_loss(spec),
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
pub(crate) fn needs_order(spec: &LayerSpec) -> bool {
    spec.capacity.order == CapacityOrder::BatchPrioritized
}

pub(crate) fn expert_scan(spec: &LayerSpec, training: bool) -> ExpertScanDesc {
    ExpertScanDesc {
        experts: spec.shape.experts,
        routed_experts: spec.routed_experts(),
        top_k: spec.shape.top_k,
        capacity: Capacity {
            // An argument of each call: see `row_limit`.
            factor: 1.0,
            eval_factor: None,
            ..spec.capacity.clone()
        },
        scale: spec.router.scale,
        external: spec.router.kind == RouterKind::External,
        keep_sums: training && spec.capacity.renormalize_after_drop,
        drawn: training && spec.capacity.order == CapacityOrder::Random,
    }
}

pub(crate) fn dispatch(spec: &LayerSpec) -> DispatchDesc {
    DispatchDesc {
        model_dim: spec.expert_input_dim(),
        experts: spec.shape.experts,
        top_k: spec.shape.top_k,
        activations: spec.precision.activations,
        weighted: spec.router.weight_on == WeightSite::Input,
    }
}

/// Both products of the routed experts.
pub(crate) fn grouped_gemm(spec: &LayerSpec, half: Half) -> GroupedGemmDesc {
    let weighted = spec.router.weight_on == WeightSite::Activation;
    let shape = &spec.shape;
    GroupedGemmDesc {
        half,
        experts: shape.experts,
        dense: false,
        top_k: shape.top_k,
        weighted: weighted && (half == Half::Up || spec.experts.bias.down()),
        plain_rows: half == Half::Up && spec.router.weight_on != WeightSite::Input,
        ..expert_half(spec, half, &routed_widths(spec), spec.experts.bias)
    }
}

/// Widths of an expert.
struct Widths {
    input: usize,
    hidden: usize,
    output: usize,
}

fn routed_widths(spec: &LayerSpec) -> Widths {
    Widths {
        input: spec.expert_input_dim(),
        hidden: spec.shape.hidden_dim,
        output: spec.expert_output_dim(),
    }
}

/// Both products of a shared expert.
pub(crate) fn shared_gemm(spec: &LayerSpec, half: Half, index: usize) -> GroupedGemmDesc {
    let widths = Widths {
        input: spec.shape.model_dim,
        hidden: spec.shared[index].hidden_dim,
        output: spec.output_dim(),
    };
    expert_half(spec, half, &widths, spec.shared_bias(index))
}

fn expert_half(spec: &LayerSpec, half: Half, widths: &Widths, biases: Biases) -> GroupedGemmDesc {
    let experts = &spec.experts;
    let (inner, outer) = match half {
        Half::Up => (widths.input, widths.hidden),
        Half::Down => (widths.hidden, widths.output),
    };
    GroupedGemmDesc {
        half,
        experts: 1,
        dense: true,
        top_k: 1,
        inner,
        outer,
        gated: half == Half::Up && experts.form == ExpertForm::Gated,
        activation: experts.activation.clone(),
        alpha: experts.alpha,
        clamp: experts.clamp,
        up_offset: experts.up_offset,
        bias: match half {
            Half::Up => biases.up(),
            Half::Down => biases.down(),
        },
        weighted: false,
        plain_rows: false,
        weights: spec.precision.weights,
        activations: spec.precision.activations,
        tf32: spec.precision.tf32,
        keep: false,
    }
}

/// A projection around the routed experts: the down half of an expert, which
/// has no activation, whatever its direction.
pub(crate) fn latent_gemm(spec: &LayerSpec, way: Half) -> GroupedGemmDesc {
    let (inner, outer) = match way {
        Half::Down => (spec.shape.model_dim, spec.expert_input_dim()),
        Half::Up => (spec.expert_output_dim(), spec.output_dim()),
    };
    let widths = Widths {
        input: 0,
        hidden: inner,
        output: outer,
    };
    let biases = spec.latent.as_ref().is_some_and(|latent| latent.bias);
    expert_half(spec, Half::Down, &widths, biases.into())
}

/// Whether a projection or a weight comes between the sum of the routed experts
/// and the shared ones.
fn apart(spec: &LayerSpec) -> bool {
    spec.latent.is_some() || spec.residual().is_some()
}

/// Whether what the routed experts add up to is a tensor of its own, to which
/// shared experts are added by another `combine`.
pub(crate) fn adds_later(spec: &LayerSpec) -> bool {
    apart(spec) && !spec.shared.is_empty()
}

/// The sum over the routed experts, and the shared ones unless a projection or
/// a weight comes between.
pub(crate) fn combine(spec: &LayerSpec) -> CombineDesc {
    let shared = if apart(spec) { &[] } else { &*spec.shared };
    CombineDesc {
        output_dim: spec.expert_output_dim(),
        experts: spec.shape.experts,
        identity: spec.experts.identity,
        zero: spec.experts.zero,
        top_k: spec.shape.top_k,
        activations: spec.precision.activations,
        weighted: spec.router.weight_on == WeightSite::Output,
        shared: shared_descs(shared),
    }
}

fn shared_descs(shared: &[SharedExpert]) -> Vec<SharedDesc> {
    let of = |shared: &SharedExpert| SharedDesc {
        gated: shared.gate != SharedGate::None,
        of_pair: (shared.gate == SharedGate::Residual).then_some(1),
    };
    shared.iter().map(of).collect()
}

/// Where that [is so](adds_later): what the routed experts add up to as the
/// first shared expert, then the others.
pub(crate) fn combine_later(spec: &LayerSpec) -> CombineDesc {
    let weighted = spec.residual().is_some();
    let routed = SharedDesc {
        gated: weighted,
        of_pair: weighted.then_some(0),
    };
    CombineDesc {
        output_dim: spec.output_dim(),
        experts: 0,
        identity: 0,
        zero: 0,
        top_k: 0,
        activations: spec.precision.activations,
        weighted: false,
        shared: [vec![routed], shared_descs(&spec.shared)].concat(),
    }
}
