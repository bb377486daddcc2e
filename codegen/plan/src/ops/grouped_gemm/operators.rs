//! The GEMMs as operators: each has its tilings, its entries and its arithmetic.

use super::{ExpertGemm, GroupedGemmConfig, dgrad, entries, tiles, wgrad};
use super::{GroupedGemmDesc, GroupedGemmDgradDesc, GroupedGemmWgradDesc};
use crate::ops::{Op, Operator, TileMachine};
use moesaic_kernel::Entry;

impl Operator for GroupedGemmDesc {
    type Config = GroupedGemmConfig;

    fn tiling(&self, machine: TileMachine) -> GroupedGemmConfig {
        tiles::forward(self, machine)
    }

    fn with(self, config: GroupedGemmConfig) -> Op {
        Op::GroupedGemm { desc: self, config }
    }

    fn entries(&self, config: &GroupedGemmConfig) -> Vec<Entry> {
        entries::entries(self, config)
    }

    fn among(&self, experts: usize, top_k: usize) -> Self {
        if self.dense {
            self.clone()
        } else {
            GroupedGemmDesc {
                experts,
                top_k,
                ..self.clone()
            }
        }
    }

    fn flops(&self, _: &str, tokens: f64) -> f64 {
        let fused_shared = self
            .fused_shared
            .map_or(0, |shared| shared.inner * shared.outer);
        let of_token = self.top_k * self.inner * self.outer + fused_shared;
        2.0 * (self.matrices() * of_token) as f64 * tokens
    }
}

impl Operator for GroupedGemmDgradDesc {
    type Config = GroupedGemmConfig;

    fn tiling(&self, machine: TileMachine) -> GroupedGemmConfig {
        tiles::dgrad(self, machine)
    }

    fn with(self, config: GroupedGemmConfig) -> Op {
        Op::GroupedGemmDgrad { desc: self, config }
    }

    fn entries(&self, config: &GroupedGemmConfig) -> Vec<Entry> {
        dgrad::entries(self, config)
    }

    fn among(&self, experts: usize, top_k: usize) -> Self {
        if self.dense {
            self.clone()
        } else {
            GroupedGemmDgradDesc {
                experts,
                top_k,
                ..self.clone()
            }
        }
    }

    fn flops(&self, _: &str, tokens: f64) -> f64 {
        let both = self.gated && self.half == ExpertGemm::Up;
        let matrices = if both { 2.0 } else { 1.0 };
        2.0 * matrices * tokens * (self.top_k * self.inner * self.outer) as f64
    }
}

impl Operator for GroupedGemmWgradDesc {
    type Config = GroupedGemmConfig;

    fn tiling(&self, machine: TileMachine) -> GroupedGemmConfig {
        tiles::wgrad(self, machine)
    }

    fn with(self, config: GroupedGemmConfig) -> Op {
        Op::GroupedGemmWgrad { desc: self, config }
    }

    fn entries(&self, config: &GroupedGemmConfig) -> Vec<Entry> {
        wgrad::entries(self, config)
    }

    fn among(&self, experts: usize, top_k: usize) -> Self {
        if self.dense {
            self.clone()
        } else {
            GroupedGemmWgradDesc {
                experts,
                top_k,
                ..self.clone()
            }
        }
    }

    fn flops(&self, symbol: &str, tokens: f64) -> f64 {
        if symbol.ends_with("_rows") {
            return tokens * self.height as f64;
        }
        if symbol.ends_with("_bias") {
            return tokens * (self.top_k * self.height) as f64;
        }
        let matrices = if self.gated { 2.0 } else { 1.0 };
        2.0 * matrices * tokens * (self.top_k * self.height * self.width) as f64
    }
}
