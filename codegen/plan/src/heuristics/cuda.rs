//! Tilings for NVIDIA GPUs.

mod mma;
mod wgmma;

use super::gpu;
use crate::config::*;
use crate::desc::*;
use moesaic_kernel::{CudaArch, DType};

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

/// See [`GroupedGemmConfig`].
pub fn grouped_gemm(d: &GroupedGemmDesc, arch: CudaArch) -> GroupedGemmConfig {
    let tile_rows = tile_rows(d, arch);
    wgmma::grouped_gemm(d, arch, tile_rows)
        .or_else(|| mma::grouped_gemm(d, arch, tile_rows))
        .unwrap_or_else(|| simt(d, tile_rows))
}

/// Rows of a tile. The scan lists the tiles once for both halves of a layer, so
/// this reads only what the two share, whichever family each of them gets.
fn tile_rows(d: &GroupedGemmDesc, arch: CudaArch) -> usize {
    // At 4096 tokens the mean expert then fills one tile of 128, or two.
    let share = match arch.capability {
        _ if wgmma::is_hopper(arch) => 32,
        80.. => 16,
        _ => 0,
    };
    if is_half(d) && share * d.top_k >= d.experts {
        128
    } else {
        64
    }
}

/// Whether rows and matrices are of one 16-bit type.
fn is_half(d: &GroupedGemmDesc) -> bool {
    d.weights == d.activations && matches!(d.weights, DType::F16 | DType::Bf16)
}

/// Gate and up columns share a thread: eight rows by eight columns of sums each
/// way.
fn simt(d: &GroupedGemmDesc, tile_rows: usize) -> GroupedGemmConfig {
    let matrices = if d.gated { 2 } else { 1 };
    GroupedGemmConfig {
        threads: 128,
        tile_rows,
        tile_columns: 64 * 128 / tile_rows / matrices,
        tile_depth: 16,
        thread_rows: 8,
        thread_columns: 8 / matrices,
        family: GemmFamily::Simt { gather: false },
    }
}

/// See [`CombineConfig`].
pub fn combine(d: &CombineDesc, _: CudaArch) -> CombineConfig {
    gpu::combine(d)
}

/// See [`CombineBwdConfig`].
pub fn combine_bwd(d: &CombineBwdDesc, _: CudaArch) -> CombineBwdConfig {
    gpu::combine_bwd(d, WARP)
}

/// See [`GroupedGemmConfig`]. Row tiles are those of the forward pass.
pub fn grouped_gemm_dgrad(d: &GroupedGemmDgradDesc, arch: CudaArch) -> GroupedGemmConfig {
    let tile_rows = tile_rows(&d.forward(), arch);
    wgmma::grouped_gemm_dgrad(d, arch, tile_rows)
        .or_else(|| mma::grouped_gemm_dgrad(d, arch, tile_rows))
        .unwrap_or_else(|| gpu::simt_product(tile_rows))
}

/// See [`GroupedGemmConfig`]. A tile is a piece of a matrix; depth counts rows.
pub fn grouped_gemm_wgrad(d: &GroupedGemmWgradDesc, arch: CudaArch) -> GroupedGemmConfig {
    wgmma::grouped_gemm_wgrad(d, arch)
        .or_else(|| mma::grouped_gemm_wgrad(d, arch))
        .unwrap_or_else(|| gpu::simt_wgrad(d))
}

/// See [`GateTopkBwdConfig`].
pub fn gate_topk_bwd(d: &GateTopkBwdDesc, _: CudaArch) -> GateTopkBwdConfig {
    gpu::gate_topk_bwd(d, WARP)
}

/// See [`DispatchBwdConfig`].
pub fn dispatch_bwd(d: &DispatchBwdDesc, _: CudaArch) -> DispatchBwdConfig {
    gpu::dispatch_bwd(d)
}
