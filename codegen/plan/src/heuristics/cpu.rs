//! Tilings for CPUs. A block is one call of the block function; threads are
//! the runtime's, so every kernel has one thread per block.

use crate::config::*;
use crate::desc::*;
use moesaic_kernel::{CpuIsa, DType};

/// Rows of a GEMM tile: enough that a panel of weights is packed and read from
/// far away seldom; with the panel their sums are a part of a second-level cache.
const TILE_ROWS: usize = 384;

/// As [`TILE_ROWS`], for AMX tiles, which have the rows near, too.
const AMX_TILE_ROWS: usize = 320;

/// Columns of a GEMM block, of gate and up together: with 256 words of depth,
/// panel and sums are a fraction of any second-level cache.
const BLOCK_COLUMNS: usize = 256;

/// Words of depth that a block of AMX tiles has near: with the rows of a tile
/// about half of a second-level cache of 2 MiB.
const AMX_DEPTH: usize = 1024;

/// Columns of the right factor of a weight's gradient: a slice of the left one
/// is read from far away once for all of them.
const WGRAD_COLUMNS: usize = 1024;

/// Columns of the right factor where there is one matrix only, as a router's:
/// more blocks, so that more threads share the pass over all tokens.
const DENSE_COLUMNS: usize = 128;

/// Likewise, where the matrix has few rows. With more rows the narrow panel
/// costs more than that brings.
const NARROW_COLUMNS: usize = 64;
const FEW_ROWS: usize = 32;

/// See [`GateTopkConfig`].
pub fn gate_topk(d: &GateTopkDesc, isa: CpuIsa) -> GateTopkConfig {
    GateTopkConfig {
        logits_threads: 1,
        logits_tile_tokens: 16,
        logits_tile_experts: d.experts.next_multiple_of(isa.vector_bytes() / 4).min(64),
        logits_tile_depth: 512,
        select_threads: 1,
        select_tile_tokens: 32,
        select_lanes: 1,
        histogram: Histogram::None,
    }
}

/// See [`ExpertScanConfig`].
pub fn expert_scan(_: &ExpertScanDesc, _: CpuIsa) -> ExpertScanConfig {
    ExpertScanConfig {
        threads: 1,
        scan_threads: 1,
        tile: ScanTile::Assignments(4096),
        block_tiles: 1,
        counted_by: CountedBy::Scan,
        chunk_tiles: None,
        sort_run: None,
        tile_rows: TILE_ROWS,
    }
}

/// See [`DispatchConfig`].
pub fn dispatch(_: &DispatchDesc, _: CpuIsa) -> DispatchConfig {
    DispatchConfig {
        threads: 1,
        tile_rows: 64,
        row_threads: 1,
    }
}

/// See [`GroupedGemmConfig`]. Depth counts 32-bit words.
pub fn grouped_gemm(d: &GroupedGemmDesc, isa: CpuIsa) -> GroupedGemmConfig {
    let family = family(isa, d.weights, d.activations);
    let matrices = d.matrices();
    if family == GemmFamily::Tiles {
        return tiles(d, matrices);
    }
    let (thread_rows, strip) = register_tile(isa);
    // A gated product has gate and up side by side in a strip.
    let thread_columns = strip / matrices;
    let block_columns = BLOCK_COLUMNS / matrices;
    GroupedGemmConfig {
        tile_columns: block_columns.min(d.outer.next_multiple_of(thread_columns)),
        thread_rows,
        thread_columns,
        gather: d.plain_rows && !d.dense,
        packed: true,
        ..plain_gemm()
    }
}

/// AMX: four tiles of sums, 16 by 16 each. Adjacent blocks have the same rows,
/// which stay near; where they do not fit whole, sums stay near too, and a block
/// has more columns.
fn tiles(d: &GroupedGemmDesc, matrices: usize) -> GroupedGemmConfig {
    let thread_columns = AMX_STRIP / matrices;
    let words = d.inner.div_ceil(2);
    let slices = words.div_ceil(AMX_DEPTH);
    let tile_depth = words.div_ceil(slices).next_multiple_of(16);
    let block_columns = if slices == 1 { 256 } else { 512 } / matrices;
    let tile_columns = block_columns.min(d.outer.next_multiple_of(thread_columns));
    let (rows, panel) = (AMX_TILE_ROWS * tile_depth, tile_depth * AMX_STRIP);
    let sums = match slices {
        1 => 0,
        _ => AMX_TILE_ROWS * tile_columns * matrices,
    };
    GroupedGemmConfig {
        tile_rows: AMX_TILE_ROWS,
        tile_columns,
        tile_depth,
        thread_rows: AMX_STRIP,
        thread_columns,
        family: GemmFamily::Tiles,
        gather: d.plain_rows && !d.dense,
        packed: true,
        shared_bytes: (64 + 4 * (rows + sums + panel)) as u32,
        ..plain_gemm()
    }
}

/// What multiplies factors of these types.
fn family(isa: CpuIsa, left: DType, right: DType) -> GemmFamily {
    match (isa, left, right) {
        (CpuIsa::Amx, DType::Bf16, DType::Bf16) => GemmFamily::Tiles,
        _ => GemmFamily::Simt,
    }
}

/// Rows and columns of the sums that vector registers hold; some are left for
/// operands. AVX-512 multiplies by a word that it repeats from memory, so many
/// rows cost no registers, and the panel is read for twice as many of them.
fn register_tile(isa: CpuIsa) -> (usize, usize) {
    let (rows, vectors) = match isa {
        CpuIsa::Avx512 | CpuIsa::Avx512Bf16 | CpuIsa::Amx => (12, 2),
        CpuIsa::Neon | CpuIsa::NeonBf16 => (6, 4),
        CpuIsa::Portable | CpuIsa::Avx2 => (6, 2),
    };
    (rows, vectors * isa.vector_bytes() / 4)
}

/// See [`CombineConfig`].
pub fn combine(_: &CombineDesc, _: CpuIsa) -> CombineConfig {
    CombineConfig {
        threads: 1,
        tile_tokens: 32,
        token_threads: 1,
    }
}

/// See [`CombineBwdConfig`].
pub fn combine_bwd(_: &CombineBwdDesc, _: CpuIsa) -> CombineBwdConfig {
    CombineBwdConfig {
        threads: 1,
        tile_rows: 64,
        row_threads: 1,
        tile_tokens: 32,
        token_threads: 1,
    }
}

/// See [`GroupedGemmConfig`].
pub fn grouped_gemm_dgrad(d: &GroupedGemmDgradDesc, isa: CpuIsa) -> GroupedGemmConfig {
    if family(isa, d.weights, d.activations) == GemmFamily::Tiles {
        return dgrad_tiles(d);
    }
    let (thread_rows, thread_columns) = register_tile(isa);
    GroupedGemmConfig {
        tile_columns: BLOCK_COLUMNS.min(d.outer.next_multiple_of(thread_columns)),
        thread_rows,
        thread_columns,
        ..plain_gemm()
    }
}

/// Strips of a panel of the weights, and of activations: what is packed together,
/// since lines that lie side by side are read together. There are two panels.
const AMX_DGRAD_STRIPS: usize = 2;
const AMX_WGRAD_STRIPS: usize = 4;

/// Rows and columns of the sums of four AMX tiles.
const AMX_STRIP: usize = 32;

/// The rows of a block stay near whole, where they fit, for all columns;
/// otherwise a slice of them, and all sums.
fn dgrad_tiles(d: &GroupedGemmDgradDesc) -> GroupedGemmConfig {
    let products = if d.half == Half::Up && d.gated { 2 } else { 1 };
    let words = d.inner.div_ceil(2).next_multiple_of(16);
    let whole = products * words <= AMX_DEPTH;
    let (kept, tile_depth, columns) = match whole {
        true => (products, words, 256),
        false => {
            let slices = words.div_ceil(AMX_DEPTH / 2);
            (1, words.div_ceil(slices).next_multiple_of(16), 512)
        }
    };
    let tile_columns = columns.min(d.outer.next_multiple_of(AMX_STRIP));
    let near = tile_depth * (kept * AMX_TILE_ROWS + 2 * AMX_STRIP * AMX_DGRAD_STRIPS);
    let sums = if whole {
        0
    } else {
        AMX_TILE_ROWS * tile_columns
    };
    GroupedGemmConfig {
        tile_rows: AMX_TILE_ROWS,
        tile_columns,
        tile_depth,
        thread_rows: AMX_STRIP,
        thread_columns: AMX_STRIP,
        family: GemmFamily::Tiles,
        shared_bytes: (64 + 4 * (near + sums)) as u32,
        ..plain_gemm()
    }
}

/// See [`GroupedGemmConfig`]. A tile is a piece of a matrix; depth counts words
/// of rows, few enough that a panel of the right factor stays near.
pub fn grouped_gemm_wgrad(d: &GroupedGemmWgradDesc, isa: CpuIsa) -> GroupedGemmConfig {
    if family(isa, d.left, d.right) == GemmFamily::Tiles {
        return wgrad_tiles(d);
    }
    let (thread_rows, thread_columns) = register_tile(isa);
    let columns = match d.dense {
        true if d.height <= FEW_ROWS => NARROW_COLUMNS,
        true => DENSE_COLUMNS,
        false => WGRAD_COLUMNS,
    };
    GroupedGemmConfig {
        tile_rows: TILE_ROWS.min(d.height.next_multiple_of(thread_rows)),
        tile_columns: columns.min(d.width.next_multiple_of(thread_columns)),
        thread_rows,
        thread_columns,
        ..plain_gemm()
    }
}

/// A slice of the left factor stays near while all columns of a block go by.
fn wgrad_tiles(d: &GroupedGemmWgradDesc) -> GroupedGemmConfig {
    const DEPTH: usize = 256;
    const HEIGHT: usize = 768;
    let tiles = d.height.div_ceil(HEIGHT);
    let tile_rows = d.height.div_ceil(tiles).next_multiple_of(AMX_STRIP);
    let panels = 2 * DEPTH * AMX_STRIP * AMX_WGRAD_STRIPS;
    GroupedGemmConfig {
        tile_rows,
        tile_columns: 1024.min(d.width.next_multiple_of(AMX_STRIP)),
        tile_depth: DEPTH,
        thread_rows: AMX_STRIP,
        thread_columns: AMX_STRIP,
        family: GemmFamily::Tiles,
        shared_bytes: (64 + 4 * (tile_rows * DEPTH + panels)) as u32,
        ..plain_gemm()
    }
}

fn plain_gemm() -> GroupedGemmConfig {
    GroupedGemmConfig {
        threads: 1,
        tile_rows: TILE_ROWS,
        tile_columns: BLOCK_COLUMNS,
        tile_depth: 256,
        thread_rows: 6,
        thread_columns: 16,
        family: GemmFamily::Simt,
        stages: 1,
        gather: false,
        packed: false,
        shared_bytes: 0,
        tf32: false,
    }
}

/// See [`GateTopkBwdConfig`].
pub fn gate_topk_bwd(_: &GateTopkBwdDesc, _: CpuIsa) -> GateTopkBwdConfig {
    GateTopkBwdConfig {
        threads: 1,
        tile_tokens: 64,
        columns: 128,
        sum_threads: 1,
    }
}

/// See [`DispatchBwdConfig`].
pub fn dispatch_bwd(_: &DispatchBwdDesc, _: CpuIsa) -> DispatchBwdConfig {
    DispatchBwdConfig {
        threads: 1,
        tile_tokens: 32,
        token_threads: 1,
    }
}
