//! How a kernel is tiled. A config never changes what is computed, only how
//! work is cut into blocks; `heuristics` chooses it per target.

use serde::{Deserialize, Serialize};

/// The tiling of one kernel source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelConfig {
    /// For [`crate::GateTopkDesc`].
    GateTopk(GateTopkConfig),
    /// For [`crate::ExpertScanDesc`].
    ExpertScan(ExpertScanConfig),
    /// For [`crate::DispatchDesc`].
    Dispatch(DispatchConfig),
    /// For [`crate::GroupedGemmDesc`].
    GroupedGemm(GroupedGemmConfig),
    /// For [`crate::CombineDesc`].
    Combine(CombineConfig),
}

/// Tiling of `gate_topk`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateTopkConfig {
    /// Threads per block of the logits kernels.
    pub logits_threads: u32,
    /// Tokens per block of the logits kernels.
    pub logits_tile_tokens: usize,
    /// Experts per block of the logits kernels.
    pub logits_tile_experts: usize,
    /// Elements of the model dimension staged at a time.
    pub logits_tile_depth: usize,
    /// Threads per block of the selection kernel.
    pub select_threads: u32,
    /// Tokens per block of the selection kernel.
    pub select_tile_tokens: usize,
}

/// Tiling of `expert_scan`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertScanConfig {
    /// Threads per block of the count and place kernels.
    pub threads: u32,
    /// Threads of the one-block offsets kernel.
    pub scan_threads: u32,
    /// Assignments (token, slot) per block.
    pub tile_slots: usize,
    /// Rows per tile of the grouped GEMM, whose tile list the scan writes.
    pub tile_rows: usize,
}

/// Tiling of `dispatch`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DispatchConfig {
    /// Threads per block.
    pub threads: u32,
    /// Rows per block.
    pub tile_rows: usize,
}

/// The unit that multiplies in a `grouped_gemm`, and with it the template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GemmFamily {
    /// The ordinary arithmetic units: any type, any shape, every target.
    #[default]
    Simt,
    /// `mma.sync` with `cp.async` and `ldmatrix`: NVIDIA sm_80 and later.
    Mma,
    /// `wgmma` fed by the copy engine: NVIDIA sm_90a.
    Wgmma,
    /// Matrix-core instructions of AMD's data-centre GPUs: gfx90a, gfx94x, gfx95x.
    Mfma,
    /// Wave matrix instructions of AMD's gfx11.
    Wmma,
}

/// Tiling of `grouped_gemm`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupedGemmConfig {
    /// Threads per block.
    pub threads: u32,
    /// Rows per block; a tile never crosses experts.
    pub tile_rows: usize,
    /// Output columns per block (of gate and of up alike).
    pub tile_columns: usize,
    /// Elements of the inner dimension staged at a time.
    pub tile_depth: usize,
    /// Rows per thread (GPU) or per register tile (CPU).
    pub thread_rows: usize,
    /// Columns per thread (GPU) or per register tile (CPU).
    pub thread_columns: usize,
    /// Which unit multiplies.
    #[serde(default)]
    pub family: GemmFamily,
    /// Tiles of the inner dimension in flight; 1 where the family has no ring.
    #[serde(default)]
    pub stages: usize,
    /// The up half reads rows straight from x, so that no step dispatches.
    #[serde(default)]
    pub gather: bool,
    /// Dynamic shared memory of a block in bytes.
    #[serde(default)]
    pub shared_bytes: u32,
}

/// Tiling of `combine`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CombineConfig {
    /// Threads per block.
    pub threads: u32,
    /// Tokens per block.
    pub tile_tokens: usize,
}
