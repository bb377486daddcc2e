//! Tilings for CPUs. A block is one call of the block function; threads are
//! the runtime's, so every kernel has one thread per block.

use crate::config::*;
use crate::desc::*;
use moesaic_kernel::CpuIsa;

/// Rows of a GEMM tile: enough that packing a panel of weights once per tile
/// costs little, few enough that eight experts still fill two dozen cores.
const TILE_ROWS: usize = 192;

/// Columns of the weight panel of a GEMM block: a multiple of every register
/// tile, and with 256 words of depth a fraction of any second-level cache.
const PANEL_COLUMNS: usize = 128;

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
    let lanes = isa.vector_bytes() / 4;
    // Accumulators of a register tile are rows x vectors; some registers are
    // left for operands. A gated product has gate and up side by side.
    let (thread_rows, vectors) = match isa.vector_registers() {
        32 => (6, 4),
        _ => (6, 2),
    };
    let matrices = if d.gated { 2 } else { 1 };
    let thread_columns = lanes * vectors / matrices;
    let panel_columns = PANEL_COLUMNS / matrices;
    GroupedGemmConfig {
        threads: 1,
        tile_rows: TILE_ROWS,
        tile_columns: panel_columns.min(d.outer.next_multiple_of(thread_columns)),
        tile_depth: 256,
        thread_rows,
        thread_columns,
        family: GemmFamily::Simt,
        stages: 1,
        gather: false,
        shared_bytes: 0,
        tf32: false,
    }
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
    let (thread_rows, thread_columns) = one_matrix(isa);
    GroupedGemmConfig {
        tile_columns: PANEL_COLUMNS.min(d.outer.next_multiple_of(thread_columns)),
        thread_rows,
        thread_columns,
        ..plain_gemm()
    }
}

/// See [`GroupedGemmConfig`]. A tile is a piece of a matrix; depth counts words
/// of rows, few enough that both panels stay near.
pub fn grouped_gemm_wgrad(d: &GroupedGemmWgradDesc, isa: CpuIsa) -> GroupedGemmConfig {
    let (thread_rows, thread_columns) = one_matrix(isa);
    GroupedGemmConfig {
        tile_rows: TILE_ROWS.min(d.height.next_multiple_of(thread_rows)),
        tile_columns: PANEL_COLUMNS.min(d.width.next_multiple_of(thread_columns)),
        tile_depth: 128,
        thread_rows,
        thread_columns,
        ..plain_gemm()
    }
}

/// Rows and columns of a register tile of one matrix.
fn one_matrix(isa: CpuIsa) -> (usize, usize) {
    let vectors = match isa.vector_registers() {
        32 => 4,
        _ => 2,
    };
    (6, vectors * isa.vector_bytes() / 4)
}

fn plain_gemm() -> GroupedGemmConfig {
    GroupedGemmConfig {
        threads: 1,
        tile_rows: TILE_ROWS,
        tile_columns: PANEL_COLUMNS,
        tile_depth: 256,
        thread_rows: 6,
        thread_columns: 16,
        family: GemmFamily::Simt,
        stages: 1,
        gather: false,
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
