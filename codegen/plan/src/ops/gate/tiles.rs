//! How `gate_topk` is tiled.

use super::{GateTopkDesc, Logits};
use crate::ops::{Core, Machine};
use moesaic_spec::CapacityOrder;
use serde::{Deserialize, Serialize};

/// Tiling of `gate_topk`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateTopkConfig {
    /// Threads per block of the logits kernels.
    pub logits_threads: u32,
    /// Tokens per block of the logits kernels.
    pub logits_tile_tokens: usize,
    /// Experts per block of the logits kernels.
    pub logits_tile_experts: usize,
    /// Elements of the model dimension staged at a time.
    pub logits_tile_depth: usize,
    /// Threads per block of the selection kernel.
    pub select_threads: u32,
    /// Tokens per block of the selection kernel.
    pub select_tile_tokens: usize,
    /// Adjacent lanes that select for one token: a power of two. More than a warp
    /// has are all threads of the block.
    pub select_lanes: u32,
    /// What the selection kernel writes of `tile_counts`.
    pub histogram: Histogram,
}

/// The rows of `tile_counts` that a block of the selection kernel writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Histogram {
    /// None: the scan counts for itself.
    #[default]
    None,
    /// One, of all choices of its tokens.
    Tokens,
    /// One per slot, of the choices of its tokens there.
    Slots,
}

/// Most experts of which the lanes of a warp hold a token's scores, 32 each. Of
/// more, a block does, and what it sums over tokens goes to memory.
pub const WARP_EXPERTS: usize = 1024;

/// Tokens of a tile of the scan, where their assignments are few enough.
const TILE_TOKENS: usize = 64;

/// Assignments that a warp of the scan places one after the other.
const TILE_SLOTS: usize = 512;

/// Counters that a block of the selection kernel keeps: 32 KB.
const HISTOGRAM: usize = 8192;

impl GateTopkConfig {
    /// The tiling on a machine.
    pub(super) fn choose(d: &GateTopkDesc, machine: Machine) -> GateTopkConfig {
        match machine {
            Machine::Cpu(core) => on_cpu(d, core),
            Machine::Gpu(gpu) => on_gpu(d, gpu.wave()),
        }
    }
}

fn on_cpu(d: &GateTopkDesc, core: Core) -> GateTopkConfig {
    GateTopkConfig {
        logits_threads: 1,
        logits_tile_tokens: 16,
        logits_tile_experts: d
            .experts
            .next_multiple_of(core.isa.vector_bytes() / 4)
            .min(64),
        logits_tile_depth: 512,
        select_threads: 1,
        select_tile_tokens: 32,
        select_lanes: 1,
        histogram: Histogram::None,
    }
}

fn on_gpu(d: &GateTopkDesc, wave: u32) -> GateTopkConfig {
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

/// Threads of the block that sees to one token of a layer with so many experts
/// that the registers of a warp do not hold them: eight experts each.
pub(in crate::ops) fn team(experts: usize) -> Option<u32> {
    (experts > WARP_EXPERTS).then(|| experts.next_power_of_two() as u32 / 8)
}

/// Tokens of a tile: see [`crate::ScanTile::Tokens`]. The selection kernel counts by
/// the same tiles.
pub(in crate::ops) fn tile_tokens(order: CapacityOrder, top_k: usize) -> usize {
    match order {
        CapacityOrder::TokenMajor => (TILE_SLOTS / top_k).clamp(1, TILE_TOKENS),
        _ => TILE_TOKENS,
    }
}

/// What a selection kernel counts: tiles have to be of adjacent tokens, and
/// the counters of one block have to fit its shared memory.
pub(in crate::ops) fn histogram(order: CapacityOrder, experts: usize, top_k: usize) -> Histogram {
    match order {
        CapacityOrder::BatchPrioritized => Histogram::None,
        CapacityOrder::TokenMajor if experts <= HISTOGRAM => Histogram::Tokens,
        CapacityOrder::TokenMajor => Histogram::None,
        _ if experts * top_k <= HISTOGRAM => Histogram::Slots,
        _ => Histogram::None,
    }
}
