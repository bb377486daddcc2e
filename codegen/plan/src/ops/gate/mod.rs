//! `gate_topk`: from tokens to experts and weights.

pub(crate) mod bwd;
mod desc;
mod entries;
mod steps;
mod tiles;

pub use desc::{GateTopkDesc, Logits};
pub(crate) use desc::{gate_topk, noise_gate, shared_gate};
pub(in crate::ops) use entries::counters;
pub(crate) use steps::selection_tensors;
pub use tiles::{GateTopkConfig, Histogram, WARP_EXPERTS};
pub(in crate::ops) use tiles::{histogram, team, tile_tokens};

use super::{Machine, Op, Operator};
use moesaic_kernel::Entry;

impl Operator for GateTopkDesc {
    type Config = GateTopkConfig;

    fn tiling(&self, machine: Machine) -> GateTopkConfig {
        GateTopkConfig::choose(self, machine)
    }

    fn with(self, config: GateTopkConfig) -> Op {
        Op::GateTopk { desc: self, config }
    }

    fn entries(&self, config: &GateTopkConfig) -> Vec<Entry> {
        entries::entries(self, config)
    }

    fn flops(&self, symbol: &str, tokens: f64) -> f64 {
        match (symbol, self.logits) {
            ("gate_project", Logits::Cosine(p)) => 2.0 * tokens * (p * self.model_dim) as f64,
            ("gate_logits", Logits::Cosine(p)) => 2.0 * tokens * (p * self.experts) as f64,
            ("gate_logits", _) => 2.0 * tokens * (self.model_dim * self.experts) as f64,
            _ => tokens * (self.experts * 4) as f64,
        }
    }
}
