//! `route`: the router of decode calls on a GPU. Its first launch computes logits, a few experts in
//! each block; its second does selection and scan in one block.
//!
//! The results are those of `gate_topk` and `expert_scan`, with the same order of sums, so a token
//! is routed alike in every batch.

mod steps;

pub(crate) use steps::Routed;

use super::expert_scan::{CountedBy, ExpertScanConfig, ExpertScanDesc, ScanTile};
use super::gate_topk::{GateTopkConfig, GateTopkDesc, Histogram, Logits};
use super::params::{entry, one};
use super::{Calls, DECODE_TOKENS, Op, Operator, TileMachine};
use moesaic_kernel::{Access, Entry, Param, ParamType, Size};
use serde::{Deserialize, Serialize};

/// `route`: x `[T, d]` to ids, weights and rows, in decode calls.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouteDesc {
    /// The gate.
    pub gate: GateTopkDesc,
    /// The scan, where one block does selection and scan.
    pub scan: Option<ExpertScanDesc>,
}

/// Tiling of `route`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteConfig {
    /// The tiling of the selection, and the cut of the sums of logits.
    pub gate: GateTopkConfig,
    /// The tiling of the scan, with as many threads.
    pub scan: Option<ExpertScanConfig>,
    /// The tiling of the logits, where they are a plain GEMM.
    pub logits: Option<DecodeLogits>,
}

/// The tiling of the logits: a block owns one expert or two, and some tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecodeLogits {
    /// Threads per block.
    pub threads: u32,
    /// Tokens of a block.
    pub tile_tokens: usize,
    /// Experts of a block.
    pub tile_experts: usize,
    /// Elements of the model dimension for which a block has its experts' matrix in shared memory.
    pub panel: usize,
    /// Parts of a sum, as `gate_logits` cuts it: element k belongs to part `k % 32 / (32 / parts)`.
    pub parts: usize,
}

/// The entry that makes logits.
const LOGITS: &str = "route_logits";

/// Bytes of shared memory that a block may declare; the rest is for exchange between warps.
const SHARED: usize = (48 << 10) - 1024;

impl Operator for RouteDesc {
    type Config = RouteConfig;

    fn tiling(&self, machine: TileMachine) -> RouteConfig {
        let gate = self.gate.tiling(machine);
        let scan = self.scan.as_ref().map(|scan| scan.tiling(machine));
        let logits = decode_logits(&self.gate, &gate);
        let tile = DECODE_TOKENS as usize;
        // One block selects and then scans, so both have the same threads.
        let scan = scan.map(|scan| ExpertScanConfig {
            threads: gate.select_threads,
            scan_threads: gate.select_threads,
            tile: ScanTile::Tokens(tile),
            // One block sums the counts of all experts.
            sum_experts: self.scan.as_ref().map(|scan| scan.routed_experts),
            ..scan
        });
        let blocks = |config: ExpertScanConfig| {
            let tiles = self.scan.as_ref().map(|scan| scan.tiles(&config));
            let block_tiles = tiles.map_or(0, |tiles| tiles.eval(DECODE_TOKENS) as usize);
            ExpertScanConfig {
                block_tiles,
                ..config
            }
        };
        RouteConfig {
            gate: GateTopkConfig {
                select_tile_tokens: match scan {
                    Some(_) => tile,
                    None => gate.select_tile_tokens,
                },
                ..gate
            },
            scan: scan.map(blocks),
            logits,
        }
    }

    fn with(self, config: RouteConfig) -> Op {
        Op::Route { desc: self, config }
    }

    fn entries(&self, config: &RouteConfig) -> Vec<Entry> {
        let logits = config
            .logits
            .map(|decode| self.logits(&config.gate, decode));
        logits.into_iter().chain(self.route(config)).collect()
    }

    fn flops(&self, symbol: &str, tokens: f64) -> f64 {
        let of_gate = match symbol {
            LOGITS => "gate_logits",
            _ => "gate_topk",
        };
        self.gate.flops(of_gate, tokens)
    }
}

impl RouteDesc {
    /// Returns whether one block can do selection and scan of a decode call.
    fn is_one_block(&self, machine: TileMachine) -> bool {
        let Some(scan) = &self.scan else {
            return false;
        };
        let config = self.tiling(machine);
        let (Some(tiling), gate) = (&config.scan, &config.gate) else {
            return false;
        };
        let TileMachine::Gpu(gpu) = machine else {
            return false;
        };
        let logits = config.logits.is_some() || self.gate.logits == Logits::None;
        let counted = tiling.counted_by == CountedBy::Gate && gate.histogram != Histogram::None;
        // Orders by a score sort tokens, and expert choice and blocks compare tokens, in launches
        // of their own.
        let alone = self.gate.expert_choice().is_none() && self.gate.blocks().is_none();
        let plain = !scan.ordered() && !scan.ranked() && alone;
        let warps = (gate.select_threads / gpu.wave()) as usize;
        // With more experts than a warp holds, a block selects for one token, and one block would
        // take 64 turns.
        let team = gate.select_lanes <= gpu.wave();
        // A warp counts and places one tile, so the tiles of the largest decode call must not
        // outnumber the warps.
        let fits = tiling.block_tiles <= warps && self.shared_bytes(&config) <= SHARED;
        // Parts with several blocks would need a barrier between blocks, which a launch does not
        // have.
        logits && counted && plain && team && fits && self.parts(&config).iter().all(is_alone)
    }

    /// Returns the shared memory of the one block: what gate and scan declare together.
    fn shared_bytes(&self, config: &RouteConfig) -> usize {
        let (Some(scan), Some(tiling)) = (&self.scan, &config.scan) else {
            return 0;
        };
        let counted = match config.gate.histogram {
            Histogram::Slots => self.gate.top_k,
            _ => 1,
        };
        // Counts, counters of each tile, and where each expert begins; a few more words.
        let per_expert = counted + tiling.block_tiles + 1;
        4 * (per_expert * scan.routed_experts + 4)
    }

    /// Returns the entries of gate and scan whose work one block does, one after the other.
    pub fn parts(&self, config: &RouteConfig) -> Vec<Entry> {
        let (Some(scan), Some(tiling)) = (&self.scan, &config.scan) else {
            return Vec::new();
        };
        let gate = self.gate.entries(&config.gate).into_iter();
        let scan = scan.entries(tiling).into_iter();
        gate.filter(|entry| entry.symbol == "gate_topk")
            .chain(scan)
            .collect()
    }

    fn route(&self, config: &RouteConfig) -> Option<Entry> {
        let parts = self.parts(config);
        let threads = parts.first()?.launch.threads;
        let summary = "selects experts and gives every assignment its row, in one block";
        let params = together(&parts);
        Some(entry("route", summary, params, [one(), one()], threads))
    }

    fn logits(&self, gate: &GateTopkConfig, decode: DecodeLogits) -> Entry {
        let entries = self.gate.entries(gate).into_iter();
        let mut known = entries.filter(|entry| entry.symbol == "gate_logits");
        let mut logits = known.next().expect("few logits are those of a gate");
        let of_experts = self.gate.experts.div_ceil(decode.tile_experts);
        let blocks = of_experts + self.gate.shared.div_ceil(decode.tile_experts);
        // A name of its own, by which `flops` and profiles tell it from the gate's.
        logits.symbol = LOGITS.to_string();
        logits.launch.threads = decode.threads;
        logits.launch.grid = [
            Size::Tokens.ceil_div(decode.tile_tokens as u64),
            Size::Const(blocks as u64),
        ];
        logits
    }
}

/// Returns whether an entry has one block in every decode call.
fn is_alone(entry: &Entry) -> bool {
    entry.launch.blocks(DECODE_TOKENS) == 1
}

/// The most experts that have blocks of their own.
const LONE_EXPERTS: usize = 64;

/// The most tokens of a block.
const TILE_TOKENS: usize = 32;

/// Returns the tiling of logits that are a plain GEMM of the tokens. A block reads its tokens once.
/// Half as many experts per block read tokens twice as often; half as many tokens per block read
/// the matrix twice as often, which costs less. So few experts have a block each, and more share a
/// block by twos.
fn decode_logits(d: &GateTopkDesc, c: &GateTopkConfig) -> Option<DecodeLogits> {
    let threads = c.logits_threads as usize;
    let grid = c.logits_tile_tokens / 4 * (c.logits_tile_experts / 4);
    // A thread of `gate_logits` sums a 4 x 4 tile, and the threads that are left over cut the sum
    // into parts. The same cut here gives the same bits, so that a token's logits do not depend on
    // the batch.
    let parts = threads / grid;
    let tile_tokens = (threads / parts).min(TILE_TOKENS);
    let least = if d.experts <= LONE_EXPERTS { 1 } else { 2 };
    (d.multiplies_tokens() && !d.training).then(|| DecodeLogits {
        threads: (tile_tokens * parts) as u32,
        tile_tokens,
        // One block has all logits of a shared expert's gate.
        tile_experts: least.max(d.shared),
        panel: 2048,
        parts,
    })
}

/// Returns the parameters of entries that become one, each once. A tensor that one entry writes and
/// a later one reads is written.
fn together(entries: &[Entry]) -> Vec<Param> {
    let mut list: Vec<Param> = Vec::new();
    for param in entries.iter().flat_map(|entry| &entry.params) {
        match list.iter_mut().find(|known| known.name == param.name) {
            None => list.push(param.clone()),
            Some(known) => widen(known, param),
        }
    }
    list.retain(|param| param.name != "tokens"); // the last of every entry
    list
}

/// Makes a read of `known` a read and a write if `later` writes it.
fn widen(known: &mut Param, later: &Param) {
    let (ParamType::Tensor(dtype, Access::Read), Some((_, access))) = (known.ty, later.ty.tensor())
    else {
        return;
    };
    if access != Access::Read {
        known.ty = ParamType::Tensor(dtype, Access::ReadWrite);
    }
}

/// Returns the calls of an entry of the gate, given the decode kernels.
pub(crate) fn gate_calls(routed: Routed, symbol: &str) -> Calls {
    match (routed, symbol) {
        (Routed::Whole, _) | (Routed::Logits, "gate_logits") => Calls::Prefill,
        _ => Calls::All,
    }
}
