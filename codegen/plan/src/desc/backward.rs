//! What the kernels of a backward pass compute.
//!
//! Kept from the forward pass: x, the pre-activations, and the routing record.
//! With `dout` the rows of the output's gradient (not weighted), `w` a row's
//! weight, `a` its activation and `P = dout · down`:
//!
//! ```text
//! dw = <P, a> (+ <dout, down bias>)        hidden = w · a
//! dgate, dup = act'(gate, up) · w · P      drows = dgate · gate + dup · up
//! ```
//!
//! so that an expert's output is never needed (gradient of `<dout, a · downᵀ>`
//! moved to the left factor).

use super::{GroupedGemmDesc, Half, apart, grouped_gemm, latent_gemm, shared_gemm};
use moesaic_kernel::DType;
use moesaic_spec::{Activation, LayerSpec, RouterKind, SharedGate, WeightSite};
use serde::{Deserialize, Serialize};

/// `combine_bwd`: dy `[T, d_out]` to `dout [R, d_out]`, later the sums of
/// `grouped_gemm_dgrad` to the gradient of `topk_weights`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CombineBwdDesc {
    /// d.
    pub model_dim: usize,
    /// d_out.
    pub output_dim: usize,
    /// Experts with rows; ids from here on are identity experts.
    pub experts: usize,
    /// Identity experts.
    pub identity: usize,
    /// Zero experts, with the ids after those.
    pub zero: usize,
    /// K.
    pub top_k: usize,
    /// Element type of x, rows and gradients of both.
    pub activations: DType,
    /// Element type of biases.
    pub weights: DType,
    /// Where the weight acts: at `Input` its gradient is `<drows, x>`.
    pub weight_on: WeightSite,
    /// The down bias is weighted, so it has a part in the weight's gradient.
    pub bias: bool,
    /// Columns of `dweight_parts`: the column tiles of `grouped_gemm_dgrad`.
    pub parts: usize,
    /// The router's scale where weights were renormalised after dropping.
    pub renormalized: Option<f64>,
    /// Shared experts, in order.
    pub shared: Vec<SharedBwdDesc>,
}

/// A shared expert as `combine_bwd` and `dispatch_bwd` see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedBwdDesc {
    /// Its output is multiplied by σ of its logit.
    pub gated: bool,
    /// With a gate: by the second of the softmax of two logits, and what the
    /// routed experts add up to by the first.
    pub residual: bool,
    /// Its output has a bias, which is weighted where there is a gate.
    pub bias: bool,
    /// Columns of its parts of the weight's gradient.
    pub parts: usize,
}

impl SharedBwdDesc {
    /// Logits of a token, where there is a gate.
    pub fn logits(&self) -> usize {
        if self.residual { 2 } else { 1 }
    }
}

/// `grouped_gemm_dgrad`: gradients of what a half reads.
///
/// Down: `P = dout · down`, and from it `hidden`, `dgate`, `dup` and the parts
/// of the weight's gradient. Up: `drows = dgate · gate + dup · up`. Matrices
/// lie as in the forward pass, `[E, inner, outer]` with the sum over `inner`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupedGemmDgradDesc {
    /// Whose input: the down half's is the activation, the up half's the row.
    pub half: Half,
    /// Groups of rows, each with its own matrix.
    pub experts: usize,
    /// Rows are all tokens and there is one matrix.
    pub dense: bool,
    /// K; 1 when dense.
    pub top_k: usize,
    /// Width of an incoming gradient row, summed over: d_out (down), h (up).
    pub inner: usize,
    /// Width of a result row: h (down), d (up).
    pub outer: usize,
    /// Down: two pre-activations. Up: two products are added.
    pub gated: bool,
    /// φ, for the down half.
    pub activation: Activation,
    /// See [`moesaic_spec::Experts`].
    pub alpha: f64,
    /// See [`moesaic_spec::Experts`].
    pub clamp: Option<f64>,
    /// See [`moesaic_spec::Experts`].
    pub up_offset: f64,
    /// Down: rows have weights, which multiply `hidden`, `dgate` and `dup`, and
    /// whose gradient is summed in parts.
    pub weighted: bool,
    /// Element type of the matrices.
    pub weights: DType,
    /// Element type of rows and results.
    pub activations: DType,
    /// f32 factors may be rounded to TF32.
    pub tf32: bool,
}

/// `grouped_gemm_wgrad`: `grad[e] = Σ over rows of e of leftᵀ · right`, f32.
///
/// Down: left is `dout`, right is `hidden`. Up: left is `dgate` and `dup`,
/// right is `rows`. The bias gradients are sums of left over rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupedGemmWgradDesc {
    /// Whose matrices.
    pub half: Half,
    /// Matrices of each kind.
    pub experts: usize,
    /// Rows are all tokens and there is one matrix of each kind.
    pub dense: bool,
    /// K; 1 when dense.
    pub top_k: usize,
    /// Rows of a matrix, width of left: d_out (down), h (up).
    pub height: usize,
    /// Columns of a matrix, width of right: h (down), d (up).
    pub width: usize,
    /// Up: gate and up matrices, which share right.
    pub gated: bool,
    /// Whether bias gradients are computed.
    pub bias: bool,
    /// Down: rows of left are multiplied by their weight in the bias gradient.
    pub weighted_bias: bool,
    /// Up: right is x at the rows' tokens, so it can be read from there.
    pub plain_rows: bool,
    /// Element type of left.
    pub left: DType,
    /// Element type of right.
    pub right: DType,
    /// f32 factors may be rounded to TF32.
    pub tf32: bool,
}

/// `dispatch_bwd`: gradients of rows, shared experts and router to dx `[T, d]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DispatchBwdDesc {
    /// d.
    pub model_dim: usize,
    /// Experts with rows; ids from here on are identity experts.
    pub experts: usize,
    /// Identity experts, whose part is `weight · dy`.
    pub identity: usize,
    /// Zero experts, with the ids after those.
    pub zero: usize,
    /// K.
    pub top_k: usize,
    /// Element type of rows, dy and dx.
    pub activations: DType,
    /// Rows were multiplied by their weight before the expert.
    pub weighted: bool,
    /// Shared experts: rows `shared_i_drows [T, d]`, with a gate also
    /// `shared_i_dlogit [T, 1]` times its router row.
    pub shared: Vec<SharedBwdDesc>,
    /// The router's part `router_dx [T, d]`, f32.
    pub router: bool,
}

impl GroupedGemmDgradDesc {
    /// The up half of the forward pass: the row tiles are its.
    pub fn forward(&self) -> GroupedGemmDesc {
        let (inner, outer) = (self.outer, self.inner);
        GroupedGemmDesc {
            half: self.half,
            experts: self.experts,
            dense: self.dense,
            top_k: self.top_k,
            inner,
            outer,
            gated: self.gated && self.half == Half::Up,
            activation: self.activation.clone(),
            alpha: self.alpha,
            clamp: self.clamp,
            up_offset: self.up_offset,
            bias: false,
            weighted: false,
            plain_rows: false,
            weights: self.weights,
            activations: self.activations,
            tf32: self.tf32,
            keep: false,
        }
    }
}

/// Whether the gate's weights have a gradient towards the router.
pub(super) fn routed_back(spec: &LayerSpec) -> bool {
    spec.has_logits() && spec.router.kind != RouterKind::External
}

/// Backward of `combine`, of as many experts as that adds up.
pub(crate) fn combine_bwd(
    spec: &LayerSpec,
    parts: usize,
    shared_parts: &[usize],
) -> CombineBwdDesc {
    let shared_parts = if apart(spec) { &[] } else { shared_parts };
    CombineBwdDesc {
        model_dim: spec.expert_input_dim(),
        output_dim: spec.expert_output_dim(),
        experts: spec.shape.experts,
        identity: spec.experts.identity,
        zero: spec.experts.zero,
        top_k: spec.shape.top_k,
        activations: spec.precision.activations,
        weights: spec.precision.weights,
        weight_on: spec.router.weight_on,
        bias: spec.experts.bias.down() && spec.router.weight_on != WeightSite::Input,
        parts,
        renormalized: spec
            .capacity
            .renormalize_after_drop
            .then_some(spec.router.scale),
        shared: shared(spec, shared_parts),
    }
}

/// Backward of `combine_later`, where a shared expert has a gate.
pub(crate) fn combine_bwd_later(spec: &LayerSpec, shared_parts: &[usize]) -> CombineBwdDesc {
    CombineBwdDesc {
        model_dim: spec.shape.model_dim,
        output_dim: spec.output_dim(),
        experts: 0,
        identity: 0,
        zero: 0,
        top_k: 0,
        activations: spec.precision.activations,
        weights: spec.precision.weights,
        weight_on: WeightSite::Output,
        bias: false,
        parts: 0,
        renormalized: None,
        shared: shared(spec, shared_parts),
    }
}

fn shared(spec: &LayerSpec, parts: &[usize]) -> Vec<SharedBwdDesc> {
    let list = spec.shared.iter().zip(parts).enumerate();
    list.map(|(index, (shared, &parts))| SharedBwdDesc {
        gated: shared.gate != SharedGate::None,
        residual: shared.gate == SharedGate::Residual,
        bias: spec.shared_bias(index).down(),
        parts,
    })
    .collect()
}

/// Backward of a routed half.
pub(crate) fn grouped_gemm_dgrad(spec: &LayerSpec, half: Half) -> GroupedGemmDgradDesc {
    let weighted = half == Half::Down && spec.router.weight_on != WeightSite::Input;
    dgrad(&grouped_gemm(spec, half), spec, weighted)
}

/// Backward of a shared expert's half.
pub(crate) fn shared_dgrad(spec: &LayerSpec, half: Half, index: usize) -> GroupedGemmDgradDesc {
    let shared = &spec.shared[index];
    let weighted = half == Half::Down && shared.gate != SharedGate::None;
    dgrad(&shared_gemm(spec, half, index), spec, weighted)
}

fn dgrad(forward: &GroupedGemmDesc, spec: &LayerSpec, weighted: bool) -> GroupedGemmDgradDesc {
    GroupedGemmDgradDesc {
        half: forward.half,
        experts: forward.experts,
        dense: forward.dense,
        top_k: forward.top_k,
        inner: forward.outer,
        outer: forward.inner,
        gated: spec.gated(),
        activation: forward.activation.clone(),
        alpha: forward.alpha,
        clamp: forward.clamp,
        up_offset: forward.up_offset,
        weighted,
        weights: forward.weights,
        activations: forward.activations,
        tf32: forward.tf32,
    }
}

/// `router_dx = dlogits · W`, for a projection to `width` numbers.
pub(crate) fn router_dgrad(spec: &LayerSpec, width: usize) -> GroupedGemmDgradDesc {
    GroupedGemmDgradDesc {
        half: Half::Up,
        experts: 1,
        dense: true,
        top_k: 1,
        inner: width,
        outer: spec.shape.model_dim,
        gated: false,
        activation: Activation::Relu,
        alpha: 1.0,
        clamp: None,
        up_offset: 0.0,
        weighted: false,
        weights: DType::F32,
        activations: DType::F32,
        tf32: false,
    }
}

/// Backward of a projection around the routed experts: as of the up half of a
/// plain expert, whose input's gradient is a product alone.
pub(crate) fn latent_dgrad(spec: &LayerSpec, way: Half) -> GroupedGemmDgradDesc {
    GroupedGemmDgradDesc {
        half: Half::Up,
        gated: false,
        ..dgrad(&latent_gemm(spec, way), spec, false)
    }
}

/// Gradients of its matrix and bias.
pub(crate) fn latent_wgrad(spec: &LayerSpec, way: Half) -> GroupedGemmWgradDesc {
    GroupedGemmWgradDesc {
        half: Half::Up,
        ..wgrad(&latent_gemm(spec, way), spec)
    }
}

/// Gradients of a routed half's matrices.
pub(crate) fn grouped_gemm_wgrad(spec: &LayerSpec, half: Half) -> GroupedGemmWgradDesc {
    let plain = half == Half::Up && spec.router.weight_on != WeightSite::Input;
    let weighted = half == Half::Down && spec.router.weight_on != WeightSite::Input;
    GroupedGemmWgradDesc {
        plain_rows: plain,
        weighted_bias: weighted && spec.experts.bias.down(),
        ..wgrad(&grouped_gemm(spec, half), spec)
    }
}

/// Gradients of a shared half's matrices.
pub(crate) fn shared_wgrad(spec: &LayerSpec, half: Half, index: usize) -> GroupedGemmWgradDesc {
    let shared = &spec.shared[index];
    let weighted = half == Half::Down && shared.gate != SharedGate::None;
    GroupedGemmWgradDesc {
        weighted_bias: weighted && spec.shared_bias(index).down(),
        ..wgrad(&shared_gemm(spec, half, index), spec)
    }
}

fn wgrad(forward: &GroupedGemmDesc, spec: &LayerSpec) -> GroupedGemmWgradDesc {
    GroupedGemmWgradDesc {
        half: forward.half,
        experts: forward.experts,
        dense: forward.dense,
        top_k: forward.top_k,
        height: forward.outer,
        width: forward.inner,
        gated: forward.half == Half::Up && spec.gated(),
        bias: forward.bias,
        weighted_bias: false,
        plain_rows: false,
        left: forward.activations,
        right: forward.activations,
        tf32: forward.tf32,
    }
}

/// `grad W = dlogitsᵀ · x`, for a projection to `width` numbers. `right` is
/// the element type of what the router read.
pub(crate) fn router_wgrad(
    spec: &LayerSpec,
    width: usize,
    bias: bool,
    right: DType,
) -> GroupedGemmWgradDesc {
    GroupedGemmWgradDesc {
        half: Half::Up,
        experts: 1,
        dense: true,
        top_k: 1,
        height: width,
        width: spec.shape.model_dim,
        gated: false,
        bias,
        weighted_bias: false,
        plain_rows: false,
        left: DType::F32,
        right,
        tf32: false,
    }
}

/// `grad W = dlogitsᵀ · x` of a shared expert's gate.
pub(crate) fn shared_gate_wgrad(spec: &LayerSpec, index: usize) -> GroupedGemmWgradDesc {
    let gate = spec.shared[index].gate;
    let bias = gate == SharedGate::Residual;
    router_wgrad(spec, gate.logits(), bias, spec.precision.activations)
}

/// Gradients of what the routed experts read; with a projection before them
/// that is not yet the token.
pub(crate) fn dispatch_bwd(spec: &LayerSpec, shared_parts: &[usize]) -> DispatchBwdDesc {
    let latent = spec.latent.is_some();
    let shared_parts = if latent { &[] } else { shared_parts };
    DispatchBwdDesc {
        model_dim: spec.expert_input_dim(),
        experts: spec.shape.experts,
        identity: spec.experts.identity,
        zero: spec.experts.zero,
        top_k: spec.shape.top_k,
        activations: spec.precision.activations,
        weighted: spec.router.weight_on == WeightSite::Input,
        shared: shared(spec, shared_parts),
        router: routed_back(spec) && !latent,
    }
}

/// Gradients of tokens before a projection: its input's as if it were a shared
/// expert's, those of the others, and the router's.
pub(crate) fn dispatch_bwd_later(spec: &LayerSpec, shared_parts: &[usize]) -> DispatchBwdDesc {
    let projected = SharedBwdDesc {
        gated: false,
        residual: false,
        bias: false,
        parts: 0,
    };
    DispatchBwdDesc {
        model_dim: spec.shape.model_dim,
        experts: 0,
        identity: 0,
        zero: 0,
        top_k: 0,
        activations: spec.precision.activations,
        weighted: false,
        shared: [vec![projected], shared(spec, shared_parts)].concat(),
        router: routed_back(spec),
    }
}
