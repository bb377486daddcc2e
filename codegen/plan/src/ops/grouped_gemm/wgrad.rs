//! `grouped_gemm_wgrad`: gradients of expert matrices and biases.

use super::entries::{Follow, PANEL, operand};
use super::{ExpertGemm, GroupedGemmConfig, GroupedGemmDesc, desc};
use crate::ops::params::{edges, entry, gradient, gradient_of, one, per_slot, tokens_by, when};
use moesaic_kernel::DType::{self, F32, I32, I64};
use moesaic_kernel::{Entry, Param, Size};
use moesaic_spec::{CapacityMode, Chooser, LayerSpec, Select, SharedGate, WeightSite};
use serde::{Deserialize, Serialize};

/// `grouped_gemm_wgrad`: `grad[e] = Σ over rows of e of leftᵀ · right`, summed in f32.
///
/// Down: left is `dout`, right is `hidden`. Up: left is `dgate` and `dup`, right is `rows`. The
/// gradient of a bias is the sum of left over rows, in f32.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupedGemmWgradDesc {
    /// The half whose matrices have the gradient.
    pub half: ExpertGemm,
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
    /// Up: right is x at the tokens of the rows, so the kernel can gather it.
    pub plain_rows: bool,
    /// Up, dense: an entry copies right first, with zeros for the rows whose left is all zeros.
    /// Those belong to tokens without a gradient, which may hold NaN, and 0 · NaN is NaN.
    pub clears: bool,
    /// Element type of left.
    pub left: DType,
    /// Element type of right.
    pub right: DType,
    /// Element type of the matrices' gradients: f32, or 16 bits, to which a sum is rounded once.
    pub gradient: DType,
    /// f32 operands may be rounded to TF32.
    pub tf32: bool,
}

/// Returns the wgrad of a routed half.
pub(crate) fn routed(spec: &LayerSpec, half: ExpertGemm) -> GroupedGemmWgradDesc {
    let plain = half == ExpertGemm::Up && spec.router.weight_on != WeightSite::Input;
    let weighted = half == ExpertGemm::Down && spec.weighs_gemms();
    GroupedGemmWgradDesc {
        plain_rows: plain,
        weighted_bias: weighted && spec.experts.bias.down(),
        gradient: spec.precision.expert_gradients,
        ..of(&desc::routed(spec, half), spec)
    }
}

/// Returns the wgrad of a shared expert's half.
pub(crate) fn shared(spec: &LayerSpec, half: ExpertGemm, index: usize) -> GroupedGemmWgradDesc {
    let shared = &spec.shared[index];
    let weighted = half == ExpertGemm::Down && shared.gate != SharedGate::None;
    GroupedGemmWgradDesc {
        weighted_bias: weighted && spec.shared_bias(index).down(),
        gradient: spec.precision.expert_gradients,
        ..of(&desc::shared(spec, half, index), spec)
    }
}

fn of(forward: &GroupedGemmDesc, spec: &LayerSpec) -> GroupedGemmWgradDesc {
    GroupedGemmWgradDesc {
        half: forward.half,
        experts: forward.experts,
        dense: forward.dense,
        top_k: forward.top_k,
        height: forward.outer,
        width: forward.inner,
        gated: forward.half == ExpertGemm::Up && spec.gated(),
        bias: forward.bias,
        weighted_bias: false,
        plain_rows: false,
        clears: false,
        left: forward.activations,
        right: forward.activations,
        gradient: F32,
        tf32: forward.tf32,
    }
}

/// Returns `grad W = dlogitsᵀ · x`, for a projection to `width` numbers. `right` is the element
/// type of the router's input.
pub(crate) fn router(
    spec: &LayerSpec,
    width: usize,
    bias: bool,
    right: DType,
) -> GroupedGemmWgradDesc {
    GroupedGemmWgradDesc {
        half: ExpertGemm::Up,
        experts: 1,
        dense: true,
        top_k: 1,
        height: width,
        width: spec.shape.model_dim,
        gated: false,
        bias,
        weighted_bias: false,
        plain_rows: false,
        clears: has_empty_tokens(spec),
        left: DType::F32,
        right,
        gradient: F32,
        tf32: false,
    }
}

/// Returns `grad W = dlogitsᵀ · x` of a shared expert's gate.
pub(crate) fn shared_gate(spec: &LayerSpec, index: usize) -> GroupedGemmWgradDesc {
    let gate = spec.shared[index].gate;
    let bias = gate == SharedGate::Residual;
    GroupedGemmWgradDesc {
        // A shared expert computes something for every token.
        clears: false,
        ..router(spec, gate.logits(), bias, spec.precision.activations)
    }
}

/// Returns the gradients of the matrix and bias of a projection.
pub(crate) fn latent(spec: &LayerSpec, way: ExpertGemm) -> GroupedGemmWgradDesc {
    GroupedGemmWgradDesc {
        half: ExpertGemm::Up,
        // The way up reads sums, which are zeros where nothing was computed.
        clears: way == ExpertGemm::Down && has_empty_tokens(spec),
        ..of(&desc::latent(spec, way), spec)
    }
}

/// Returns whether a call may have tokens that no routed expert computes anything for: masked ones,
/// and those whose assignments are all dropped.
pub(crate) fn has_empty_tokens(spec: &LayerSpec) -> bool {
    use CapacityMode::{Dropless, MaxCount};
    let r = &spec.router;
    // A caller may mask a slot by a negative id, and a table masks token ids that it does not have.
    let given = r.kind.chooser() != Chooser::Scores;
    let chosen = matches!(r.select, Select::ExpertChoice(_));
    // A capacity of the largest count has room for every assignment.
    let drops = !matches!(spec.capacity.mode, Dropless | MaxCount);
    r.token_mask || r.active_k || given || chosen || drops
}

pub(super) fn entries(d: &GroupedGemmWgradDesc, c: &GroupedGemmConfig) -> Vec<Entry> {
    let mut list: Vec<Entry> = d.clears.then(|| cleared(d, c)).into_iter().collect();
    list.push(matrices(d, c));
    list.extend(d.bias.then(|| bias(d, c)));
    list
}

/// Returns the names of the left operands, and of the matrices whose gradients they give.
fn lefts(d: &GroupedGemmWgradDesc) -> Vec<(&'static str, &'static str)> {
    match (d.half, d.gated) {
        (ExpertGemm::Down, _) => vec![("dout", "down")],
        (ExpertGemm::Up, true) => vec![("dgate", "gate"), ("dup", "up")],
        (ExpertGemm::Up, false) => vec![("dup", "up")],
    }
}

fn matrices(d: &GroupedGemmWgradDesc, c: &GroupedGemmConfig) -> Entry {
    let (e, count) = (d.experts, if d.dense { "tokens" } else { "rows" });
    let operand = |name: &str, dtype: DType, width: usize| {
        let shape = format!("[{count}, {width}]");
        operand(c, name, dtype, &shape, &[PANEL, c.tile_depth])
    };
    let right = match (d.half, c.gather()) {
        (ExpertGemm::Down, _) => operand("hidden", d.right, d.width),
        (ExpertGemm::Up, false) => operand("rows", d.right, d.width),
        (ExpertGemm::Up, true) => Param::read("x", d.right, format!("[tokens, {}]", d.width)),
    };
    let shape = format!("[{e}, {}, {}]", d.height, d.width);
    let left = lefts(d).into_iter();
    let mut params: Vec<Param> = left
        .map(|(name, _)| operand(name, d.left, d.height))
        .collect();
    params.push(right);
    params.extend(when(!d.dense, Param::read("offsets", I64, edges(e))));
    params.extend(when(c.gather(), Param::read("row_slots", I32, "[rows]")));
    params.extend(
        lefts(d)
            .iter()
            .map(|(_, matrix)| gradient_of(matrix, d.gradient, &shape)),
    );
    params.push(Param::i64("accumulate"));
    let tiles = e * d.height.div_ceil(c.tile_rows);
    let columns = d.width.div_ceil(c.tile_columns);
    let grid = Follow::wgrad(c).grid(Size::Const(tiles as u64), Size::Const(columns as u64));
    let (symbol, summary) = match d.half {
        ExpertGemm::Down => ("grouped_gemm_wgrad_down", "gradients of the down matrices"),
        ExpertGemm::Up => (
            "grouped_gemm_wgrad_up",
            "gradients of the matrices before the activation",
        ),
    };
    let mut entry = entry(symbol, summary, params, grid, c.threads);
    entry.launch.shared_bytes = c.shared_bytes();
    entry
}

/// Tokens that a block of [`cleared`] copies.
const CLEARED_ROWS: usize = 16;

/// Returns the entry that copies right and zeroes the rows that must add nothing, once, so that the
/// GEMMs need no condition.
fn cleared(d: &GroupedGemmWgradDesc, c: &GroupedGemmConfig) -> Entry {
    let right = format!("[tokens, {}]", d.width);
    let params = vec![
        Param::read("dup", d.left, format!("[tokens, {}]", d.height)),
        Param::read("given", d.right, &right),
        Param::write("rows", d.right, &right),
    ];
    let summary = "copies rows, with zeros for those whose gradients are all zeros";
    let grid = [tokens_by(CLEARED_ROWS), one()];
    entry(
        "grouped_gemm_wgrad_up_rows",
        summary,
        params,
        grid,
        c.threads,
    )
}

fn bias(d: &GroupedGemmWgradDesc, c: &GroupedGemmConfig) -> Entry {
    let (e, count) = (d.experts, if d.dense { "tokens" } else { "rows" });
    let shape = format!("[{e}, {}]", d.height);
    let rows = format!("[{count}, {}]", d.height);
    let left = lefts(d).into_iter();
    let mut params: Vec<Param> = left
        .map(|(name, _)| Param::read(name, d.left, &rows))
        .collect();
    let weighted = d.weighted_bias;
    params.extend(when(!d.dense, Param::read("offsets", I64, edges(e))));
    params.extend(when(
        weighted && !d.dense,
        Param::read("row_slots", I32, "[rows]"),
    ));
    params.extend(when(
        weighted,
        Param::read("topk_weights", F32, per_slot(d.top_k)),
    ));
    params.extend(
        lefts(d)
            .iter()
            .map(|(_, matrix)| gradient(matrix, "_bias", &shape)),
    );
    params.push(Param::i64("accumulate"));
    let columns = d.height.div_ceil(c.bias_columns());
    let grid = [Size::Const(e as u64), Size::Const(columns as u64)];
    let (symbol, summary) = match d.half {
        ExpertGemm::Down => (
            "grouped_gemm_wgrad_down_bias",
            "gradients of the down biases",
        ),
        ExpertGemm::Up => (
            "grouped_gemm_wgrad_up_bias",
            "gradients of the biases before the activation",
        ),
    };
    entry(symbol, summary, params, grid, c.threads)
}
