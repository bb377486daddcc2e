//! Tilings of the `mma.sync` family: sm_80 and later.

use super::WARP;
use crate::config::{GemmFamily, GroupedGemmConfig};
use crate::desc::GroupedGemmDesc;
use moesaic_kernel::{CudaArch, DType};

/// Bytes of a row of a tile in shared memory: all banks once.
const LINE: usize = 128;

/// Two warps share the rows and two the columns; four of f32, where a product
/// needs more registers. `None` for types and shapes that the family does not
/// take.
pub fn grouped_gemm(
    d: &GroupedGemmDesc,
    arch: CudaArch,
    tile_rows: usize,
) -> Option<GroupedGemmConfig> {
    if !takes(d, arch) {
        return None;
    }
    let matrices = if d.gated { 2 } else { 1 };
    // Small pieces take more of them, each with an address; fewer sums leave room.
    let whole = (d.inner * d.weights.size()).is_multiple_of(16);
    let most = if whole { 128 } else { 64 };
    let tile_columns = d.outer.next_power_of_two().clamp(32, most / matrices);
    let column_warps = if d.weights == DType::F32 && tile_columns >= 64 {
        4
    } else {
        2
    };
    let stage = (tile_rows + matrices * tile_columns) * LINE;
    let stages = stages(stage, arch);
    Some(GroupedGemmConfig {
        threads: 2 * column_warps as u32 * WARP,
        tile_rows,
        tile_columns,
        tile_depth: LINE / d.weights.size(),
        thread_rows: tile_rows / 2,
        thread_columns: tile_columns / column_warps,
        family: GemmFamily::Mma,
        stages,
        gather: d.plain_rows && !d.dense,
        shared_bytes: (stages * stage) as u32,
        tf32: false,
    })
}

/// Whether the matrix units take this product: one type on both sides, and
/// rows that 4-byte copies divide. An f32 product is three on the matrix unit,
/// which pays only where those of tf32 are many times faster than f32.
fn takes(d: &GroupedGemmDesc, arch: CudaArch) -> bool {
    let fast = match d.weights {
        DType::F32 => matches!(arch.capability, 80 | 90 | 100 | 103),
        _ => arch.capability >= 80,
    };
    fast && d.weights == d.activations && (d.inner * d.weights.size()).is_multiple_of(4)
}

/// As many stages, up to four, as leave room for two blocks on a
/// multiprocessor; for one block where two would not have two stages each.
fn stages(stage: usize, arch: CudaArch) -> usize {
    let limit = shared_limit(arch);
    let two = (limit / 2 - 1024) / stage;
    let fit = if two >= 2 { two } else { limit / stage };
    fit.clamp(2, 4)
}

/// Bytes of shared memory that a block can have.
fn shared_limit(arch: CudaArch) -> usize {
    let kilobytes = match arch.capability {
        80 | 87 => 163,
        90 | 100 | 103 | 110 => 227,
        _ => 99,
    };
    kilobytes << 10
}
