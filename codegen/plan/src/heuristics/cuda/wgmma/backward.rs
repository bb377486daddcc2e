//! Tilings of backward products by `wgmma`.

use super::{LINE, TILE_DEPTH, WARPGROUP, WARPGROUP_ROWS, is_hopper, stages};
use crate::config::{GemmFamily, GroupedGemmConfig};
use crate::desc::{GroupedGemmDgradDesc, GroupedGemmWgradDesc, Half};
use moesaic_kernel::{CudaArch, DType};

/// Most columns of a tile: 128 sums per thread.
const MOST_COLUMNS: usize = 256;

/// Columns and bytes of the f32 corner of each 16 rows.
const CORNER: usize = 16 * 64 * 4;

/// A warpgroup per 64 rows that multiplies, and one that loads. `None` for
/// types and shapes that `wgmma` or the copy engine do not take.
pub fn grouped_gemm_dgrad(
    d: &GroupedGemmDgradDesc,
    arch: CudaArch,
    tile_rows: usize,
) -> Option<GroupedGemmConfig> {
    if !takes([d.weights, d.activations], [d.inner, d.outer], arch) {
        return None;
    }
    let tile_columns = d.outer.next_power_of_two().clamp(64, MOST_COLUMNS);
    let corners = tile_rows / 16 * CORNER;
    let sums = if d.gated && d.half == Half::Up { 2 } else { 1 };
    let slices = sums * d.inner.div_ceil(TILE_DEPTH);
    Some(config(tile_rows, tile_columns, tile_rows, corners, slices))
}

/// A warpgroup per 64 rows of a matrix, one for gate and one for up where there
/// are both.
pub fn grouped_gemm_wgrad(d: &GroupedGemmWgradDesc, arch: CudaArch) -> Option<GroupedGemmConfig> {
    if !takes([d.left, d.right], [d.height, d.width], arch) {
        return None;
    }
    let matrices = if d.gated { 2 } else { 1 };
    let tile_rows = d.height.next_power_of_two().clamp(64, 128 / matrices);
    let tile_columns = d.width.next_power_of_two().clamp(64, MOST_COLUMNS);
    Some(config(
        tile_rows,
        tile_columns,
        matrices * tile_rows,
        0,
        usize::MAX,
    ))
}

/// 16-bit elements of one type, in rows of whole 16 bytes.
fn takes(types: [DType; 2], widths: [usize; 2], arch: CudaArch) -> bool {
    let half = types[0] == types[1] && matches!(types[0], DType::F16 | DType::Bf16);
    is_hopper(arch) && half && widths.iter().all(|width| width.is_multiple_of(8))
}

/// `left` rows or columns of the left factor are in a stage.
fn config(
    tile_rows: usize,
    tile_columns: usize,
    left: usize,
    corners: usize,
    slices: usize,
) -> GroupedGemmConfig {
    let stage = (left + tile_columns) * LINE;
    let (stages, shared_bytes) = stages(stage, corners, slices);
    GroupedGemmConfig {
        threads: (WARPGROUP + left / WARPGROUP_ROWS * WARPGROUP) as u32,
        tile_rows,
        tile_columns,
        tile_depth: TILE_DEPTH,
        thread_rows: 16,
        thread_columns: tile_columns,
        family: GemmFamily::Wgmma,
        stages,
        gather: false,
        shared_bytes,
        tf32: false,
    }
}
