//! Tilings for NVIDIA GPUs. Tensor-core families will choose their own GEMM
//! tiles by architecture; the SIMT family is the same on all of them.

use crate::config::*;
use crate::desc::*;
use moesaic_kernel::CudaArch;

/// Lanes of a warp.
const WARP: usize = 32;

/// See [`GateTopkConfig`]. One token per warp when selecting.
pub fn gate_topk(d: &GateTopkDesc, _: CudaArch) -> GateTopkConfig {
    let columns = match d.logits {
        Logits::Cosine(_) => 32,
        _ => d.experts.next_power_of_two().clamp(4, 32),
    };
    GateTopkConfig {
        logits_threads: 256,
        logits_tile_tokens: 32,
        logits_tile_experts: columns,
        logits_tile_depth: 32,
        select_threads: 128,
        select_tile_tokens: 128 / WARP,
    }
}

/// See [`ExpertScanConfig`].
pub fn expert_scan(_: &ExpertScanDesc, _: CudaArch) -> ExpertScanConfig {
    ExpertScanConfig {
        threads: 256,
        scan_threads: 1024,
        tile_slots: 1024,
        tile_rows: 64,
    }
}

/// See [`DispatchConfig`].
pub fn dispatch(_: &DispatchDesc, _: CudaArch) -> DispatchConfig {
    DispatchConfig {
        threads: 128,
        tile_rows: 4,
    }
}

/// See [`GroupedGemmConfig`]. Gate and up columns share a thread: eight rows by
/// eight columns of sums each way.
pub fn grouped_gemm(d: &GroupedGemmDesc, _: CudaArch) -> GroupedGemmConfig {
    let matrices = if d.gated { 2 } else { 1 };
    GroupedGemmConfig {
        threads: 128,
        tile_rows: 64,
        tile_columns: 128 / matrices,
        tile_depth: 16,
        thread_rows: 8,
        thread_columns: 8 / matrices,
        family: GemmFamily::Simt,
        stages: 1,
        gather: false,
        shared_bytes: 0,
    }
}

/// See [`CombineConfig`]. The threads of a block share the columns of a token.
pub fn combine(_: &CombineDesc, _: CudaArch) -> CombineConfig {
    CombineConfig {
        threads: 128,
        tile_tokens: 1,
    }
}
