//! Tilings for AMD GPUs. Matrix-core families will choose their own GEMM
//! tiles by architecture; the SIMT family is the same on all of them.

use super::gpu;
use crate::config::*;
use crate::desc::*;
use moesaic_kernel::RocmArch;

/// See [`GateTopkConfig`].
pub fn gate_topk(d: &GateTopkDesc, arch: RocmArch) -> GateTopkConfig {
    gpu::gate_topk(d, arch.wave)
}

/// See [`ExpertScanConfig`].
pub fn expert_scan(d: &ExpertScanDesc, arch: RocmArch) -> ExpertScanConfig {
    gpu::expert_scan(d, arch.wave)
}

/// See [`DispatchConfig`].
pub fn dispatch(d: &DispatchDesc, arch: RocmArch) -> DispatchConfig {
    gpu::dispatch(d, arch.wave)
}

/// See [`GroupedGemmConfig`]. Gate and up columns share a thread: eight rows by
/// eight columns of sums each way.
pub fn grouped_gemm(d: &GroupedGemmDesc, _: RocmArch) -> GroupedGemmConfig {
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
pub fn combine(d: &CombineDesc, _: RocmArch) -> CombineConfig {
    gpu::combine(d)
}
