//! Tilings for NVIDIA GPUs.

mod mma;
mod wgmma;

use super::{simt_one_matrix, simt_wgrad};
use crate::ops::grouped_gemm::*;
use moesaic_kernel::{CudaArch, DType, MatrixUnit};

/// Lanes of a warp.
const WARP: u32 = 32;

pub fn forward(d: &GroupedGemmDesc, arch: CudaArch) -> GroupedGemmConfig {
    let tile_rows = tile_rows(d, arch);
    wgmma::forward(d, arch, tile_rows)
        .or_else(|| mma::forward(d, arch, tile_rows))
        .unwrap_or_else(|| simt(d, tile_rows))
}

pub fn decode(d: &GroupedGemmDesc, arch: CudaArch, tile_rows: usize) -> Option<GroupedGemmConfig> {
    mma::decode(d, arch, tile_rows)
}

/// Returns the rows of a tile. The scan lists row tiles once for both halves of a layer, so this
/// reads only what the halves share, whichever family each of them has.
fn tile_rows(d: &GroupedGemmDesc, arch: CudaArch) -> usize {
    // At 4096 tokens the mean expert then fills one tile of 128, or two.
    let share = match arch.caps().matrix {
        MatrixUnit::Wgmma => 32,
        MatrixUnit::Mma => 16,
        _ => 0,
    };
    if is_half(d) && share * d.top_k >= d.experts {
        128
    } else {
        64
    }
}

/// Returns whether rows and matrices have one 16-bit type.
fn is_half(d: &GroupedGemmDesc) -> bool {
    d.weights == d.activations && matches!(d.weights, DType::F16 | DType::Bf16)
}

/// Returns the SIMT tiling. Gate and up columns share a thread: eight rows by eight columns of sums
/// either way.
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

/// Returns the tiling of a dgrad, with the row tiles of the forward pass.
pub fn dgrad(d: &GroupedGemmDgradDesc, arch: CudaArch) -> GroupedGemmConfig {
    let tile_rows = tile_rows(&d.forward(), arch);
    wgmma::dgrad(d, arch, tile_rows)
        .or_else(|| mma::dgrad(d, arch, tile_rows))
        .unwrap_or_else(|| simt_one_matrix(tile_rows))
}

/// Returns the tiling of a wgrad. A tile is a part of a matrix; depth counts rows.
pub fn wgrad(d: &GroupedGemmWgradDesc, arch: CudaArch) -> GroupedGemmConfig {
    wgmma::wgrad(d, arch)
        .or_else(|| mma::wgrad(d, arch))
        .unwrap_or_else(|| simt_wgrad(d))
}
