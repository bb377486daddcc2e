//! `gate_topk_bwd`: losses, and the way back through the router.

mod desc;
mod entries;
mod steps;

pub(crate) use desc::routed_back;
pub use desc::{GateTopkBwdDesc, LossSlope, LossSum};
pub(crate) use steps::tensors;

use super::team;
use crate::ops::{Machine, Op, Operator};
use moesaic_kernel::Entry;
use serde::{Deserialize, Serialize};

/// Tiling of `gate_topk_bwd`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateTopkBwdConfig {
    /// Threads per block.
    pub threads: u32,
    /// Threads that see to one token at a time: a warp, or of many experts the
    /// block; 1 on a CPU.
    pub token_threads: u32,
    /// Tokens per block.
    pub tile_tokens: usize,
    /// Columns per block of sums over all tokens.
    pub columns: usize,
    /// Threads of the one block that finishes the losses.
    pub sum_threads: u32,
}

impl Operator for GateTopkBwdDesc {
    type Config = GateTopkBwdConfig;

    fn tiling(&self, machine: Machine) -> GateTopkBwdConfig {
        match machine {
            Machine::Cpu(_) => on_cpu(),
            Machine::Gpu(gpu) => on_gpu(self, gpu.wave()),
        }
    }

    fn with(self, config: GateTopkBwdConfig) -> Op {
        Op::GateTopkBwd { desc: self, config }
    }

    fn entries(&self, config: &GateTopkBwdConfig) -> Vec<Entry> {
        entries::entries(self, config)
    }

    fn flops(&self, _: &str, tokens: f64) -> f64 {
        tokens * (self.gate.experts * 4) as f64
    }
}

fn on_cpu() -> GateTopkBwdConfig {
    GateTopkBwdConfig {
        threads: 1,
        token_threads: 1,
        tile_tokens: 64,
        columns: 128,
        sum_threads: 1,
    }
}

fn on_gpu(d: &GateTopkBwdDesc, wave: u32) -> GateTopkBwdConfig {
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
