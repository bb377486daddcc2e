//! The operators of a layer, a folder each, backward beside forward. In it lie the
//! desc (what a kernel computes), the config (how it is tiled) and the choice of it
//! for every machine, the entries (what is launched with what), and the steps that
//! it adds to a pass. All are in the operator's `mod.rs`, in this order, or in files
//! called `desc`, `config`, `tiles`, `entries` and `steps`.

mod calls;
pub(crate) mod combine;
mod copies;
mod dispatch;
pub(crate) mod gate;
pub(crate) mod gemm;
mod machine;
mod params;
pub(crate) mod route;
pub(crate) mod scan;
mod shared;
mod wire;

pub(crate) use calls::Calls;
pub use calls::FEW_TOKENS;
pub use combine::{CombineBwdConfig, CombineBwdDesc, CombineConfig, CombineDesc, CombineFew};
pub use dispatch::{DispatchBwdConfig, DispatchBwdDesc, DispatchConfig, DispatchDesc};
pub use gate::bwd::{GateTopkBwdConfig, GateTopkBwdDesc, LossSlope, LossSum};
pub use gate::{GateTopkConfig, GateTopkDesc, Histogram, Logits, WARP_EXPERTS};
pub use gemm::{Beside, CodeBlock, CpuGemm, GemmFamily, GroupedGemmConfig, GroupedGemmDesc};
pub use gemm::{GroupedGemmDgradDesc, GroupedGemmWgradDesc, Half, Nonlinearity};
pub use machine::{Core, Gpu, Machine};
pub use route::{FewLogits, RouteConfig, RouteDesc};
pub use scan::{CountedBy, ExpertScanConfig, ExpertScanDesc, ScanTile, most_rows, row_limit};
pub use shared::{SharedBwdDesc, SharedDesc};
pub use wire::{WireConfig, WireDesc};

use moesaic_kernel::{Entry, Stem};
use serde::{Deserialize, Serialize};

/// What one kernel source computes, and how. Desc and config are of one kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "stem", rename_all = "snake_case")]
#[allow(missing_docs)] // of fields: `desc` is what to compute, `config` how it is tiled
pub enum Op {
    /// Router projection, score, selection.
    GateTopk {
        desc: GateTopkDesc,
        config: GateTopkConfig,
    },
    /// Counts, capacity, locations, maps.
    ExpertScan {
        desc: ExpertScanDesc,
        config: ExpertScanConfig,
    },
    /// Both, of few tokens.
    Route {
        desc: RouteDesc,
        config: RouteConfig,
    },
    /// Token rows to expert rows.
    Dispatch {
        desc: DispatchDesc,
        config: DispatchConfig,
    },
    /// Expert matrix products.
    GroupedGemm {
        desc: GroupedGemmDesc,
        config: GroupedGemmConfig,
    },
    /// Expert rows to tokens.
    Combine {
        desc: CombineDesc,
        config: CombineConfig,
    },
    /// The output's gradient to expert rows, and gradients of weights.
    CombineBwd {
        desc: CombineBwdDesc,
        config: CombineBwdConfig,
    },
    /// Gradients of what expert products read.
    GroupedGemmDgrad {
        desc: GroupedGemmDgradDesc,
        config: GroupedGemmConfig,
    },
    /// Gradients of expert matrices and biases.
    GroupedGemmWgrad {
        desc: GroupedGemmWgradDesc,
        config: GroupedGemmConfig,
    },
    /// Gradients of logits.
    GateTopkBwd {
        desc: GateTopkBwdDesc,
        config: GateTopkBwdConfig,
    },
    /// Gradients of expert rows to tokens.
    DispatchBwd {
        desc: DispatchBwdDesc,
        config: DispatchBwdConfig,
    },
    /// Rows as they are between nodes, and back.
    Wire { desc: WireDesc, config: WireConfig },
}

/// A desc: what a kernel computes, with every data-independent size and option
/// that is baked into its text, and nothing about tiling or targets.
pub trait Operator: Clone {
    /// How it is tiled. A config never changes what is computed, only how work is
    /// cut into blocks.
    type Config;

    /// The tiling on a machine.
    fn tiling(&self, machine: Machine) -> Self::Config;

    /// It with a tiling.
    fn with(self, config: Self::Config) -> Op;

    /// What its kernel exports, in the order it is launched.
    fn entries(&self, config: &Self::Config) -> Vec<Entry>;

    /// The least arithmetic of the entry with this symbol; a multiply-add counts two.
    fn flops(&self, symbol: &str, tokens: f64) -> f64 {
        let _ = (symbol, tokens);
        0.0
    }

    /// It as a part of a layer with so many experts and so many of them for a token:
    /// what decides about tiles, but not about what is computed.
    fn among(&self, _experts: usize, _top_k: usize) -> Self {
        self.clone()
    }
}

impl Op {
    /// The operator's name.
    pub fn stem(&self) -> Stem {
        match self {
            Op::GateTopk { .. } | Op::Route { .. } => Stem::GateTopk,
            Op::ExpertScan { .. } => Stem::ExpertScan,
            Op::Dispatch { .. } => Stem::Dispatch,
            Op::GroupedGemm { .. } => Stem::GroupedGemm,
            Op::Combine { .. } => Stem::Combine,
            Op::CombineBwd { .. } => Stem::CombineBwd,
            Op::GroupedGemmDgrad { .. } => Stem::GroupedGemmDgrad,
            Op::GroupedGemmWgrad { .. } => Stem::GroupedGemmWgrad,
            Op::GateTopkBwd { .. } => Stem::GateTopkBwd,
            Op::DispatchBwd { .. } => Stem::DispatchBwd,
            Op::Wire { .. } => Stem::Wire,
        }
    }

    /// What the kernel exports, in the order it is launched.
    pub fn entries(&self) -> Vec<Entry> {
        match self {
            Op::GateTopk { desc, config } => desc.entries(config),
            Op::ExpertScan { desc, config } => desc.entries(config),
            Op::Route { desc, config } => desc.entries(config),
            Op::Dispatch { desc, config } => desc.entries(config),
            Op::GroupedGemm { desc, config } => desc.entries(config),
            Op::Combine { desc, config } => desc.entries(config),
            Op::CombineBwd { desc, config } => desc.entries(config),
            Op::GroupedGemmDgrad { desc, config } => desc.entries(config),
            Op::GroupedGemmWgrad { desc, config } => desc.entries(config),
            Op::GateTopkBwd { desc, config } => desc.entries(config),
            Op::DispatchBwd { desc, config } => desc.entries(config),
            Op::Wire { desc, config } => desc.entries(config),
        }
    }

    /// See [`Operator::flops`].
    pub fn flops(&self, symbol: &str, tokens: f64) -> f64 {
        match self {
            Op::GateTopk { desc, .. } => desc.flops(symbol, tokens),
            Op::ExpertScan { desc, .. } => desc.flops(symbol, tokens),
            Op::Route { desc, .. } => desc.flops(symbol, tokens),
            Op::Dispatch { desc, .. } => desc.flops(symbol, tokens),
            Op::GroupedGemm { desc, .. } => desc.flops(symbol, tokens),
            Op::Combine { desc, .. } => desc.flops(symbol, tokens),
            Op::CombineBwd { desc, .. } => desc.flops(symbol, tokens),
            Op::GroupedGemmDgrad { desc, .. } => desc.flops(symbol, tokens),
            Op::GroupedGemmWgrad { desc, .. } => desc.flops(symbol, tokens),
            Op::GateTopkBwd { desc, .. } => desc.flops(symbol, tokens),
            Op::DispatchBwd { desc, .. } => desc.flops(symbol, tokens),
            Op::Wire { desc, .. } => desc.flops(symbol, tokens),
        }
    }

    /// The tiling of a product.
    pub fn gemm(&self) -> Option<&GroupedGemmConfig> {
        match self {
            Op::GroupedGemm { config, .. }
            | Op::GroupedGemmDgrad { config, .. }
            | Op::GroupedGemmWgrad { config, .. } => Some(config),
            _ => None,
        }
    }

    /// The same, to change it.
    pub fn gemm_mut(&mut self) -> Option<&mut GroupedGemmConfig> {
        match self {
            Op::GroupedGemm { config, .. }
            | Op::GroupedGemmDgrad { config, .. }
            | Op::GroupedGemmWgrad { config, .. } => Some(config),
            _ => None,
        }
    }

    /// Whether it is the gate or the scan: what decides where tokens go.
    pub fn routes(&self) -> bool {
        matches!(
            self,
            Op::GateTopk { .. } | Op::ExpertScan { .. } | Op::Route { .. }
        )
    }

    /// Whether it is the router's: see [`Op::routes`], or its losses and way back.
    pub fn of_router(&self) -> bool {
        self.routes() || matches!(self, Op::GateTopkBwd { .. })
    }

    /// Whether it sums what reaches a token: expert rows, or their gradients.
    pub fn sums_tokens(&self) -> bool {
        matches!(self, Op::Combine { .. } | Op::DispatchBwd { .. })
    }
}
