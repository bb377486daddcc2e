//! Tilings of backward products by `wgmma`.

use super::{Ring, TILE_DEPTH, is_hopper};
use crate::ops::gemm::{GroupedGemmConfig, GroupedGemmDgradDesc, GroupedGemmWgradDesc, Half};
use moesaic_kernel::{CudaArch, DType};

/// Most columns of a tile: 128 sums per thread.
const MOST_COLUMNS: usize = 256;

/// Columns and bytes of the f32 corner of each 16 rows.
const CORNER: usize = 16 * 64 * 4;

/// A warpgroup per 64 rows that multiplies, and one that loads. `None` for
/// types and shapes that `wgmma` or the copy engine do not take.
pub fn dgrad(
    d: &GroupedGemmDgradDesc,
    arch: CudaArch,
    tile_rows: usize,
) -> Option<GroupedGemmConfig> {
    if !takes([d.weights, d.activations], [d.inner, d.outer], arch) {
        return None;
    }
    let tile_columns = d.outer.next_power_of_two().clamp(64, MOST_COLUMNS);
    let sums = if d.gated && d.half == Half::Up { 2 } else { 1 };
    let ring = Ring {
        left: tile_rows,
        right: tile_columns,
        corners: tile_rows / 16 * CORNER,
        slices: sums * d.inner.div_ceil(TILE_DEPTH),
    };
    Some(ring.config(tile_rows, tile_columns))
}

/// A warpgroup per 64 rows of a matrix, one for gate and one for up where there
/// are both.
pub fn wgrad(d: &GroupedGemmWgradDesc, arch: CudaArch) -> Option<GroupedGemmConfig> {
    if !takes([d.left, d.right], [d.height, d.width], arch) {
        return None;
    }
    let matrices = if d.gated { 2 } else { 1 };
    let tile_rows = d.height.next_power_of_two().clamp(64, 128 / matrices);
    let tile_columns = d.width.next_power_of_two().clamp(64, MOST_COLUMNS);
    let ring = Ring {
        left: matrices * tile_rows,
        right: tile_columns,
        corners: 0,
        slices: usize::MAX,
    };
    Some(ring.config(tile_rows, tile_columns))
}

/// 16-bit elements of one type, in rows of whole 16 bytes.
fn takes(types: [DType; 2], widths: [usize; 2], arch: CudaArch) -> bool {
    let half = types[0] == types[1] && matches!(types[0], DType::F16 | DType::Bf16);
    is_hopper(arch) && half && widths.iter().all(|width| width.is_multiple_of(8))
}
