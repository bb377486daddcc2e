//! Tilings of backward products by `mma.sync`.

use super::super::WARP;
use super::{LINE, fast, stages};
use crate::config::{GemmFamily, GroupedGemmConfig};
use crate::desc::{GroupedGemmDgradDesc, GroupedGemmWgradDesc};
use moesaic_kernel::{CudaArch, DType};

/// Lines of a slice whose lines are steps of the contraction.
const DEPTH: usize = 32;

/// Two warps share the rows. `None` for types and shapes that the family does
/// not take.
pub fn grouped_gemm_dgrad(
    d: &GroupedGemmDgradDesc,
    arch: CudaArch,
    tile_rows: usize,
) -> Option<GroupedGemmConfig> {
    let (dtype, size) = (d.weights, d.weights.size());
    if d.weights != d.activations
        || !fast(dtype, d.tf32, arch)
        || !divide([d.inner, d.outer], size, 4)
    {
        return None;
    }
    let panel = LINE / size;
    let most = if divide([d.inner, d.outer], size, 16) {
        128
    } else {
        64
    };
    let tile_columns = d.outer.next_power_of_two().clamp(panel, most);
    let thread_columns = warp_columns(dtype, tile_columns);
    let stage = (tile_rows + tile_columns) * LINE;
    let stages = stages(stage, arch);
    Some(GroupedGemmConfig {
        threads: (2 * tile_columns / thread_columns) as u32 * WARP,
        tile_rows,
        tile_columns,
        tile_depth: panel,
        thread_rows: tile_rows / 2,
        thread_columns,
        family: GemmFamily::Mma,
        stages,
        gather: false,
        shared_bytes: (stages * stage) as u32,
        tf32: d.tf32,
    })
}

/// Two warps share the rows, gate and up where there are both. `None` for types
/// and shapes that the family does not take.
pub fn grouped_gemm_wgrad(d: &GroupedGemmWgradDesc, arch: CudaArch) -> Option<GroupedGemmConfig> {
    let (dtype, size) = (d.left, d.left.size());
    let widths = [d.height, d.width];
    if d.left != d.right || !fast(dtype, d.tf32, arch) || !divide(widths, size, 4) {
        return None;
    }
    let (panel, matrices) = (LINE / size, if d.gated { 2 } else { 1 });
    let most_rows = if dtype == DType::F32 { 64 } else { 128 };
    let most_columns = if divide(widths, size, 16) { 128 } else { 64 };
    let tile_rows = d
        .height
        .next_power_of_two()
        .clamp(panel, most_rows / matrices);
    let tile_columns = d.width.next_power_of_two().clamp(panel, most_columns);
    let thread_columns = warp_columns(dtype, tile_columns);
    let stage = (matrices * tile_rows + tile_columns) * DEPTH * size;
    let stages = stages(stage, arch);
    Some(GroupedGemmConfig {
        threads: (2 * tile_columns / thread_columns) as u32 * WARP,
        tile_rows,
        tile_columns,
        tile_depth: DEPTH,
        thread_rows: matrices * tile_rows / 2,
        thread_columns,
        family: GemmFamily::Mma,
        stages,
        gather: d.plain_rows && !d.dense,
        shared_bytes: (stages * stage) as u32,
        tf32: d.tf32,
    })
}

/// Whether `bytes` divide rows of both widths, whose elements have `size`.
fn divide(widths: [usize; 2], size: usize, bytes: usize) -> bool {
    widths
        .iter()
        .all(|width| (width * size).is_multiple_of(bytes))
}

/// Two warps share the columns; of f32, whose products need more registers, as
/// many as it takes.
fn warp_columns(dtype: DType, tile_columns: usize) -> usize {
    match dtype {
        DType::F32 => 32,
        _ => tile_columns / 2,
    }
}
