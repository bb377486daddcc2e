//! Tilings of backward GEMMs by `wgmma`.

use super::{Pipeline, TILE_DEPTH, has_wgmma};
use crate::ops::grouped_gemm::{
    ExpertGemm, GroupedGemmConfig, GroupedGemmDgradDesc, GroupedGemmWgradDesc,
};
use moesaic_kernel::{CudaArch, DType};

/// The most columns of a tile: 128 sums per thread.
const MAX_COLUMNS: usize = 256;

/// Bytes of the epilogue tile of a warp: 16 rows by 64 columns of f32.
const EPILOGUE_TILE_BYTES: usize = 16 * 64 * 4;

/// Returns the tiling of a dgrad; `None` for types and shapes that `wgmma` or TMA do not take. A
/// block has a producer warpgroup and a consumer warpgroup for each 64 rows.
pub fn dgrad(
    d: &GroupedGemmDgradDesc,
    arch: CudaArch,
    tile_rows: usize,
) -> Option<GroupedGemmConfig> {
    if !takes([d.weights, d.activations], [d.inner, d.outer], arch) {
        return None;
    }
    let tile_columns = d.outer.next_power_of_two().clamp(64, MAX_COLUMNS);
    let sums = if d.gated && d.half == ExpertGemm::Up {
        2
    } else {
        1
    };
    let pipeline = Pipeline {
        arch,
        left: tile_rows,
        right: tile_columns,
        epilogue_bytes: tile_rows / 16 * EPILOGUE_TILE_BYTES,
        slices: sums * d.inner.div_ceil(TILE_DEPTH),
    };
    Some(pipeline.config(tile_rows, tile_columns))
}

/// Returns the tiling of a wgrad; `None` for types and shapes that `wgmma` or TMA do not take. A
/// consumer warpgroup multiplies 64 rows of a matrix, one of gate and one of up where there are
/// both.
pub fn wgrad(d: &GroupedGemmWgradDesc, arch: CudaArch) -> Option<GroupedGemmConfig> {
    if !takes([d.left, d.right], [d.height, d.width], arch) {
        return None;
    }
    let matrices = if d.gated { 2 } else { 1 };
    let tile_rows = d.height.next_power_of_two().clamp(64, 128 / matrices);
    let tile_columns = d.width.next_power_of_two().clamp(64, MAX_COLUMNS);
    let pipeline = Pipeline {
        arch,
        left: matrices * tile_rows,
        right: tile_columns,
        // Sums are f32 and go to memory from the registers, in pairs, so nothing is staged.
        epilogue_bytes: 0,
        // The contraction is over the rows of an expert, which only the device has counted.
        slices: usize::MAX,
    };
    Some(pipeline.config(tile_rows, tile_columns))
}

/// Returns whether operands have one 16-bit type and rows of whole 16 bytes.
fn takes(types: [DType; 2], widths: [usize; 2], arch: CudaArch) -> bool {
    let half = types[0] == types[1] && matches!(types[0], DType::F16 | DType::Bf16);
    has_wgmma(arch) && half && widths.iter().all(|width| width.is_multiple_of(8))
}
