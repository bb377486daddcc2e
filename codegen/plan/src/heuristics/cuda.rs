//! Tilings for NVIDIA GPUs. Tensor-core families will choose their own GEMM
//! tiles by architecture; the SIMT family is the same on all of them.

use super::gpu;
use crate::config::*;
use crate::desc::*;
use moesaic_kernel::CudaArch;

/// Lanes of a warp.
const WARP: u32 = 32;

/// See [`GateTopkConfig`].
pub fn gate_topk(d: &GateTopkDesc, _: CudaArch) -> GateTopkConfig {
    gpu::gate_topk(d, WARP)
}

/// See [`ExpertScanConfig`].
pub fn expert_scan(d: &ExpertScanDesc, _: CudaArch) -> ExpertScanConfig {
    gpu::expert_scan(d, WARP)
}

/// See [`DispatchConfig`].
pub fn dispatch(d: &DispatchDesc, _: CudaArch) -> DispatchConfig {
    gpu::dispatch(d, WARP)
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

/// See [`CombineConfig`].
pub fn combine(d: &CombineDesc, _: CudaArch) -> CombineConfig {
    gpu::combine(d)
}
