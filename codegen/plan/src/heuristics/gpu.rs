//! Tilings of routing and data movement, alike for all GPUs but for the width
//! of a warp.

use crate::config::*;
use crate::desc::*;
use moesaic_kernel::DType;
use moesaic_spec::CapacityOrder;

/// Tokens of a tile of the scan, where their assignments are few enough.
const TILE_TOKENS: usize = 64;

/// Assignments that a warp of the scan places one after the other.
const TILE_SLOTS: usize = 512;

/// Counters that a block of the selection kernel keeps: 32 KB.
const HISTOGRAM: usize = 8192;

/// Counters that a block of the scan keeps: 32 KB.
const SCAN_COUNTERS: usize = 8192;

/// Threads of a block of a copying kernel.
const COPY_THREADS: u32 = 128;

/// Bytes a block of a copying kernel moves at least: less does not pay for
/// starting it.
const BLOCK_BYTES: usize = 32 << 10;

/// Slots whose sources a block of `combine` lists: 32 KB.
const BLOCK_SOURCES: usize = 4096;

/// Threads of the block that sees to one token of a layer with so many experts
/// that the registers of a warp do not hold them: eight experts each.
fn team(experts: usize) -> Option<u32> {
    (experts > WARP_EXPERTS).then(|| experts.next_power_of_two() as u32 / 8)
}

/// See [`GateTopkConfig`].
pub fn gate_topk(d: &GateTopkDesc, wave: u32) -> GateTopkConfig {
    let columns = match d.logits {
        Logits::Cosine(_) => 32,
        _ => d.experts.next_power_of_two().clamp(4, 32),
    };
    let histogram = match d.select {
        true => histogram(d.order, d.experts, d.top_k),
        false => Histogram::None,
    };
    // Without logits only the choices of a token are dealt out over lanes.
    let width = match d.logits {
        Logits::None => d.top_k,
        _ => d.experts,
    };
    let few = (width.next_power_of_two() as u32).min(wave);
    let lanes = team(width).unwrap_or(few);
    // What a lane holds of many experts takes half the registers.
    let most = if d.experts > 512 { 256 } else { 512 };
    let tokens = match histogram {
        Histogram::None => (128 / lanes).max(1) as usize,
        _ => tile_tokens(d.order, d.top_k),
    };
    GateTopkConfig {
        logits_threads: 256,
        logits_tile_tokens: 32,
        logits_tile_experts: columns,
        logits_tile_depth: 32,
        select_threads: match lanes > wave {
            true => lanes,
            false => (tokens as u32 * lanes).clamp(128, most),
        },
        select_tile_tokens: tokens,
        select_lanes: lanes,
        histogram,
    }
}

/// See [`ExpertScanConfig`].
pub fn expert_scan(d: &ExpertScanDesc, wave: u32) -> ExpertScanConfig {
    // A warp has a counter for every expert in shared memory.
    let warps = (SCAN_COUNTERS / d.routed_experts.next_power_of_two()).min(256 / wave as usize);
    let threads = warps as u32 * wave;
    let order = d.capacity.order;
    let gate = !d.external && histogram(order, d.routed_experts, d.top_k) != Histogram::None;
    ExpertScanConfig {
        threads,
        scan_threads: 1024,
        tile: ScanTile::Tokens(tile_tokens(order, d.top_k)),
        block_tiles: warps,
        counted_by: if gate {
            CountedBy::Gate
        } else {
            CountedBy::Scan
        },
        chunk_tiles: Some(64),
        sort_run: Some(1024),
        tile_rows: 64,
    }
}

/// See [`DispatchConfig`].
pub fn dispatch(d: &DispatchDesc, wave: u32) -> DispatchConfig {
    let (tile_rows, row_threads) = row_tiling(d.model_dim, d.activations, wave);
    DispatchConfig {
        threads: COPY_THREADS,
        tile_rows,
        row_threads,
    }
}

/// See [`CombineConfig`].
pub fn combine(d: &CombineDesc) -> CombineConfig {
    let rows = d.top_k + 1 + d.shared.len();
    let (tile_tokens, token_threads) = token_tiling(d.output_dim, d.activations, d.top_k, rows);
    CombineConfig {
        threads: COPY_THREADS,
        tile_tokens,
        token_threads,
    }
}

/// See [`CombineBwdConfig`].
pub fn combine_bwd(d: &CombineBwdDesc, wave: u32) -> CombineBwdConfig {
    let (tile_rows, row_threads) = row_tiling(d.output_dim, d.activations, wave);
    CombineBwdConfig {
        threads: COPY_THREADS,
        tile_rows,
        row_threads,
        tile_tokens: (COPY_THREADS / wave) as usize,
        token_threads: wave,
    }
}

/// See [`GateTopkBwdConfig`].
pub fn gate_topk_bwd(d: &GateTopkBwdDesc, wave: u32) -> GateTopkBwdConfig {
    let (threads, token_threads) = match team(d.gate.experts) {
        Some(block) => (block, block),
        None => (128, wave),
    };
    GateTopkBwdConfig {
        threads,
        token_threads,
        tile_tokens: 32,
        columns: 128,
        sum_threads: 256,
    }
}

/// See [`DispatchBwdConfig`].
pub fn dispatch_bwd(d: &DispatchBwdDesc) -> DispatchBwdConfig {
    let rows = d.top_k + 1 + d.shared.len();
    let (tile_tokens, token_threads) = token_tiling(d.model_dim, d.activations, d.top_k, rows);
    DispatchBwdConfig {
        threads: COPY_THREADS,
        tile_tokens,
        token_threads,
    }
}

/// The ordinary family's tiling of one matrix's product: eight rows by eight
/// columns of sums per thread.
pub fn simt_product(tile_rows: usize) -> GroupedGemmConfig {
    GroupedGemmConfig {
        threads: 128,
        tile_rows,
        tile_columns: 64 * 128 / tile_rows,
        tile_depth: 16,
        thread_rows: 8,
        thread_columns: 8,
        family: GemmFamily::Simt { gather: false },
    }
}

/// The ordinary family's tiling of a product over rows. The gradients of gate
/// and up share a thread, each with half of its sums.
pub fn simt_wgrad(d: &GroupedGemmWgradDesc) -> GroupedGemmConfig {
    let matrices = if d.gated { 2 } else { 1 };
    GroupedGemmConfig {
        tile_rows: 64 / matrices,
        thread_rows: 8 / matrices,
        family: GemmFamily::Simt {
            gather: d.plain_rows && !d.dense,
        },
        ..simt_product(64)
    }
}

/// Rows of a block that copies them, and threads per row.
fn row_tiling(width: usize, dtype: DType, wave: u32) -> (usize, u32) {
    let row_threads = (packs(width, dtype).next_power_of_two() as u32).min(wave);
    let at_once = (COPY_THREADS / row_threads) as usize;
    let rows = BLOCK_BYTES.div_ceil(width * dtype.size());
    (rows.min(64).next_multiple_of(at_once), row_threads)
}

/// Tokens of a block that sums `rows` rows into each, and threads per token.
fn token_tiling(width: usize, dtype: DType, top_k: usize, rows: usize) -> (usize, u32) {
    let most = 1 << (BLOCK_SOURCES / top_k.max(1)).clamp(1, 64).ilog2();
    let packs = packs(width, dtype).next_power_of_two() as u32;
    let token_threads = packs.clamp(COPY_THREADS / most as u32, COPY_THREADS);
    let at_once = (COPY_THREADS / token_threads) as usize;
    let tokens = BLOCK_BYTES.div_ceil(rows * width * dtype.size());
    (tokens.min(most).next_multiple_of(at_once), token_threads)
}

/// Tokens of a tile: see [`ScanTile::Tokens`]. The selection kernel counts by
/// the same tiles.
fn tile_tokens(order: CapacityOrder, top_k: usize) -> usize {
    match order {
        CapacityOrder::TokenMajor => (TILE_SLOTS / top_k).clamp(1, TILE_TOKENS),
        _ => TILE_TOKENS,
    }
}

/// What a selection kernel counts: tiles have to be of adjacent tokens, and
/// the counters of one block have to fit its shared memory.
fn histogram(order: CapacityOrder, experts: usize, top_k: usize) -> Histogram {
    match order {
        CapacityOrder::BatchPrioritized => Histogram::None,
        CapacityOrder::TokenMajor if experts <= HISTOGRAM => Histogram::Tokens,
        CapacityOrder::TokenMajor => Histogram::None,
        _ if experts * top_k <= HISTOGRAM => Histogram::Slots,
        _ => Histogram::None,
    }
}

/// Accesses a row takes: each of the widest pack, at most 16 bytes, that
/// divides it.
fn packs(width: usize, dtype: DType) -> usize {
    let widest = 16 / dtype.size();
    width / (1 << width.trailing_zeros()).min(widest)
}
