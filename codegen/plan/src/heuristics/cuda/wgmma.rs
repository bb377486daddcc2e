//! Tilings of the `wgmma` family: sm_90a.

use super::is_half;
use crate::config::{GemmFamily, GroupedGemmConfig};
use crate::desc::GroupedGemmDesc;
use moesaic_kernel::CudaArch;

/// Bytes of a row of a tile: a line of the 128-byte swizzle.
const LINE: usize = 128;

/// 16-bit elements of a line.
const TILE_DEPTH: usize = LINE / 2;

/// Threads of a warpgroup, and rows that it multiplies at a time.
const WARPGROUP: usize = 128;
const WARPGROUP_ROWS: usize = 64;

/// Bytes of a barrier; a stage has two.
const BARRIER: usize = 8;

/// Dynamic shared memory that a block of sm_90 can have.
const SHARED: usize = 227 << 10;

/// Most stages: more would not hide more.
const MOST_STAGES: usize = 6;

/// Whether there is `wgmma`, which no later architecture has.
pub fn is_hopper(arch: CudaArch) -> bool {
    arch.capability == 90 && arch.suffix == Some('a')
}

/// A warpgroup per 64 rows that multiplies, and one that loads. `None` for
/// types and shapes that `wgmma` or the copy engine do not take: rows have to be
/// multiples of 16 bytes.
pub fn grouped_gemm(
    d: &GroupedGemmDesc,
    arch: CudaArch,
    tile_rows: usize,
) -> Option<GroupedGemmConfig> {
    if !is_hopper(arch) || !is_half(d) || !d.inner.is_multiple_of(8) {
        return None;
    }
    // 128 sums per thread are what its registers hold beside the epilogue.
    let (matrices, most) = if d.gated { (2, 128) } else { (1, 256) };
    let tile_columns = d.outer.next_power_of_two().clamp(64, most);
    let stage = (tile_rows + matrices * tile_columns) * LINE;
    let corners = tile_rows * LINE;
    let (stages, shared_bytes) = stages(stage, corners, d.inner.div_ceil(TILE_DEPTH));
    Some(GroupedGemmConfig {
        threads: (WARPGROUP + tile_rows / WARPGROUP_ROWS * WARPGROUP) as u32,
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
    })
}

/// As many stages as fit and are used, and the bytes of all shared memory: a
/// struct whose size, like its address, is a multiple of 1024.
fn stages(stage: usize, corners: usize, slices: usize) -> (usize, u32) {
    let each = stage + 2 * BARRIER;
    let stages = ((SHARED - corners) / each).min(slices).min(MOST_STAGES);
    let bytes = stages * each + corners;
    (stages, bytes.next_multiple_of(1024) as u32)
}
