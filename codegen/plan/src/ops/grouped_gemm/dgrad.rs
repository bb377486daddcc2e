//! `grouped_gemm_dgrad`: gradients of the inputs of the experts' GEMMs.

use super::entries::{Follow, PANEL, operand, tiles_of};
use super::{CodePanel, ExpertGemm, GroupedGemmConfig, GroupedGemmDesc, Nonlinearity, desc};
use crate::CacheClass;
use crate::ops::params::{edges, entry, per_slot, some, when};
use crate::ops::{Core, Operator, TileMachine};
use moesaic_kernel::DType::{self, F32, I32, I64};
use moesaic_kernel::{CpuIsa, Entry, Param, Size};
use moesaic_spec::{LayerSpec, SharedGate, WeightFormat};
use serde::{Deserialize, Serialize};

/// `grouped_gemm_dgrad`: gradients of the inputs of a half.
///
/// Down: `P = dout · down`, and from it `hidden`, `dgate`, `dup` and the parts of the weight's
/// gradient. Up: `drows = dgate · gate + dup · up`. Matrices lie as in the forward pass, `[E,
/// inner, outer]`, and are contracted over `inner`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupedGemmDgradDesc {
    /// The half: down has the activation as input, up the row.
    pub half: ExpertGemm,
    /// Groups of rows, each with its own matrix.
    pub experts: usize,
    /// Rows are all tokens and there is one matrix.
    pub dense: bool,
    /// K; 1 when dense.
    pub top_k: usize,
    /// The width of an incoming gradient row, which is contracted: d_out (down), h (up).
    pub inner: usize,
    /// Width of a result row: h (down), d (up).
    pub outer: usize,
    /// Down: two pre-activations. Up: the sum of two GEMMs.
    pub gated: bool,
    /// The nonlinearity, for the down half.
    #[serde(flatten)]
    pub nonlinearity: Nonlinearity,
    /// Down: rows have weights, which multiply `hidden`, `dgate` and `dup`, and whose gradient the
    /// kernel sums in parts.
    pub weighted: bool,
    /// Element type of the matrices.
    pub weights: DType,
    /// The format of the matrices, where they are quantized: they are decoded a slice at a time,
    /// from the panels of the forward pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<WeightFormat>,
    /// Element type of rows and results.
    pub activations: DType,
    /// f32 operands may be rounded to TF32.
    pub tf32: bool,
}

impl GroupedGemmDgradDesc {
    /// Returns the up half of the forward pass, whose row tiles this GEMM shares.
    pub fn forward(&self) -> GroupedGemmDesc {
        let (inner, outer) = (self.outer, self.inner);
        GroupedGemmDesc {
            half: self.half,
            experts: self.experts,
            dense: self.dense,
            top_k: self.top_k,
            inner,
            outer,
            gated: self.gated && self.half == ExpertGemm::Up,
            nonlinearity: self.nonlinearity.clone(),
            bias: false,
            weighted: false,
            plain_rows: false,
            weights: self.weights,
            format: self.format,
            row_format: None,
            activations: self.activations,
            tf32: self.tf32,
            keep: false,
            fused_shared: None,
        }
    }

    /// Returns the types of the factors that a CPU multiplies. Codes are decoded to f32, and
    /// rounded to bf16 where gradients are bf16 and the CPU multiplies pairs of them.
    pub fn factors(&self, isa: CpuIsa) -> [DType; 2] {
        match self.format {
            None => [self.activations, self.weights],
            Some(_) if isa.bf16_pairs() && self.activations == DType::Bf16 => [DType::Bf16; 2],
            Some(_) => [self.activations, F32],
        }
    }

    /// Returns the packed panels of codes of the forward pass; `None` where the matrices are not
    /// quantized.
    pub fn code_panel(&self, isa: CpuIsa) -> Option<CodePanel> {
        let forward = self.forward();
        // The columns of a panel follow from types and instructions alone, whatever the caches.
        let caches = CacheClass::default();
        let config = forward.tiling(TileMachine::Cpu(Core { isa, caches }));
        forward.code_panel(&config)
    }
}

/// Returns the dgrad of a routed half.
pub(crate) fn routed(spec: &LayerSpec, half: ExpertGemm) -> GroupedGemmDgradDesc {
    let weighted = half == ExpertGemm::Down && spec.weighs_gemms();
    of(&desc::routed(spec, half), spec, weighted)
}

/// Returns the dgrad of a shared expert's half.
pub(crate) fn shared(spec: &LayerSpec, half: ExpertGemm, index: usize) -> GroupedGemmDgradDesc {
    let shared = &spec.shared[index];
    let weighted = half == ExpertGemm::Down && shared.gate != SharedGate::None;
    of(&desc::shared(spec, half, index), spec, weighted)
}

fn of(forward: &GroupedGemmDesc, spec: &LayerSpec, weighted: bool) -> GroupedGemmDgradDesc {
    GroupedGemmDgradDesc {
        half: forward.half,
        experts: forward.experts,
        dense: forward.dense,
        top_k: forward.top_k,
        inner: forward.outer,
        outer: forward.inner,
        gated: spec.gated(),
        nonlinearity: forward.nonlinearity.clone(),
        weighted,
        weights: forward.weights,
        format: forward.format,
        activations: forward.activations,
        tf32: forward.tf32,
    }
}

/// Returns `router_dx = dlogits · W`, for a projection to `width` numbers.
pub(crate) fn router(spec: &LayerSpec, width: usize) -> GroupedGemmDgradDesc {
    GroupedGemmDgradDesc {
        half: ExpertGemm::Up,
        experts: 1,
        dense: true,
        top_k: 1,
        inner: width,
        outer: spec.shape.model_dim,
        gated: false,
        nonlinearity: Nonlinearity::unused(),
        weighted: false,
        weights: DType::F32,
        format: None,
        activations: DType::F32,
        tf32: false,
    }
}

/// Returns the dgrad of a projection around the routed experts. It is that of the up half of a
/// plain expert, because the gradient of its input is a GEMM alone.
pub(crate) fn latent(spec: &LayerSpec, way: ExpertGemm) -> GroupedGemmDgradDesc {
    GroupedGemmDgradDesc {
        half: ExpertGemm::Up,
        gated: false,
        ..of(&desc::latent(spec, way), spec, false)
    }
}

pub(super) fn entries(d: &GroupedGemmDgradDesc, c: &GroupedGemmConfig) -> Vec<Entry> {
    let (e, count) = (d.experts, if d.dense { "tokens" } else { "rows" });
    let shape = format!("[{e}, {}, {}]", d.inner, d.outer);
    let tile = [PANEL, c.tile_depth, 1];
    let codes = d.format.is_some();
    let weight = |name: &str| when(!codes, operand(c, name, d.weights, &shape, &tile));
    let packed = format!("[{e}, panels, depth, columns]");
    let (inner, outer) = (
        format!("[{count}, {}]", d.inner),
        format!("[{count}, {}]", d.outer),
    );
    let incoming = |name: &str| {
        let tile = [c.tile_depth, c.tile_rows];
        operand(c, name, d.activations, &inner, &tile)
    };
    let (down, up) = (d.half == ExpertGemm::Down, d.half == ExpertGemm::Up);
    let parts = d.outer.div_ceil(c.tile_columns);
    let result = |name: &str| Param::write(name, d.activations, &outer);
    let kept = |name: &str| Param::read(name, d.activations, &outer);
    let params = some([
        when(down, incoming("dout")),
        when(up && d.gated, incoming("dgate")),
        when(up, incoming("dup")),
        weight("gate").filter(|_| up && d.gated),
        weight(if down { "down" } else { "up" }),
        when(codes, Param::read("packed", I32, packed)),
        when(down && d.gated, kept("gate_pre")),
        when(down, kept("up_pre")),
        when(!d.dense, Param::read("offsets", I64, edges(e))),
        when(!d.dense, Param::read("row_tiles", I32, edges(e))),
        when(
            d.weighted && !d.dense,
            Param::read("row_slots", I32, "[rows]"),
        ),
        when(
            d.weighted,
            Param::read("topk_weights", F32, per_slot(d.top_k)),
        ),
        when(down, result("hidden")),
        when(down && d.gated, result("dgate")),
        when(down, result("dup")),
        when(
            d.weighted,
            Param::write("dweight_parts", F32, format!("[{count}, {parts}]")),
        ),
        when(up, result("drows")),
    ]);
    let (symbol, summary) = match d.half {
        ExpertGemm::Down => ("grouped_gemm_dgrad_down", "gradients before the activation"),
        ExpertGemm::Up => ("grouped_gemm_dgrad_up", "gradients of expert rows"),
    };
    let grid = Follow::dgrad(c).grid(tiles_of(d.dense, d.top_k, e, c), Size::Const(parts as u64));
    let mut entry = entry(symbol, summary, params, grid, c.threads);
    entry.launch.shared_bytes = c.shared_bytes();
    vec![entry]
}
