//! The operators of a layer, a folder each, backward next to forward; `templates` has a folder of
//! the same name with their text. Each has the desc (what a
//! kernel computes), the config (its tiling) and its choice for every machine, the entries (what a
//! target launches), and the steps that it adds to a pass. They are in the operator's `mod.rs`, in
//! this order, or in files called `desc`, `config`, `tiles`, `entries` and `steps`.

mod calls;
pub(crate) mod combine;
mod comm_cast;
mod copies;
mod dispatch;
pub(crate) mod expert_scan;
pub(crate) mod gate_topk;
pub(crate) mod grouped_gemm;
mod machine;
mod params;
pub(crate) mod rms_norm;
pub(crate) mod route;
mod shared;

pub(crate) use calls::Calls;
pub use calls::DECODE_TOKENS;
pub use combine::{CombineBwdConfig, CombineBwdDesc, CombineConfig, CombineDecode, CombineDesc};
pub use comm_cast::{CommCastConfig, CommCastDesc};
pub use dispatch::{DispatchBwdConfig, DispatchBwdDesc, DispatchConfig, DispatchDesc};
pub use expert_scan::{
    CountedBy, ExpertScanConfig, ExpertScanDesc, ScanTile, most_rows, row_limit,
};
pub use gate_topk::bwd::{GateTopkBwdConfig, GateTopkBwdDesc, LossSlope, LossSum};
pub use gate_topk::{GateTopkConfig, GateTopkDesc, Histogram, Logits, WARP_EXPERTS};
pub use grouped_gemm::{
    CodePanel, CpuGemm, FusedShared, GemmFamily, GroupedGemmConfig, GroupedGemmDesc,
};
pub use grouped_gemm::{ExpertGemm, GroupedGemmDgradDesc, GroupedGemmWgradDesc, Nonlinearity};
pub use machine::{Core, Gpu, TileMachine};
pub use rms_norm::{RmsNormBwdConfig, RmsNormBwdDesc, RmsNormConfig, RmsNormDesc};
pub use route::{DecodeLogits, RouteConfig, RouteDesc};
pub use shared::{SharedBwdDesc, SharedDesc};

use moesaic_kernel::{Entry, Stem};
use serde::{Deserialize, Serialize};

/// The desc and config of one kernel source.
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
    /// Gate and scan of decode calls.
    Route {
        desc: RouteDesc,
        config: RouteConfig,
    },
    /// Token rows to expert rows.
    Dispatch {
        desc: DispatchDesc,
        config: DispatchConfig,
    },
    /// The experts' GEMMs.
    GroupedGemm {
        desc: GroupedGemmDesc,
        config: GroupedGemmConfig,
    },
    /// Expert rows to tokens.
    Combine {
        desc: CombineDesc,
        config: CombineConfig,
    },
    /// Rows divided by their root mean square.
    RmsNorm {
        desc: RmsNormDesc,
        config: RmsNormConfig,
    },
    /// Gradients of normalised rows, and of the weight.
    RmsNormBwd {
        desc: RmsNormBwdDesc,
        config: RmsNormBwdConfig,
    },
    /// The output's gradient to expert rows, and gradients of weights.
    CombineBwd {
        desc: CombineBwdDesc,
        config: CombineBwdConfig,
    },
    /// Gradients of the inputs of the experts' GEMMs.
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
    /// Rows to and from the communication dtype.
    CommCast {
        desc: CommCastDesc,
        config: CommCastConfig,
    },
}

/// A desc: what a kernel computes, with every size and option that its text contains, and nothing
/// about tiling or targets.
pub trait Operator: Clone {
    /// The tiling. A config never changes what is computed, only how work is cut into blocks.
    type Config;

    /// Returns the tiling on a machine.
    fn tiling(&self, machine: TileMachine) -> Self::Config;

    /// Returns the desc with a tiling.
    fn with(self, config: Self::Config) -> Op;

    /// Returns the entries of the kernel, in the order of their launches.
    fn entries(&self, config: &Self::Config) -> Vec<Entry>;

    /// Returns the least arithmetic of the entry with this symbol; a multiply-add counts two.
    fn flops(&self, symbol: &str, tokens: f64) -> f64 {
        let _ = (symbol, tokens);
        0.0
    }

    /// Returns the desc as part of a layer with this many experts, `top_k` of them for each token.
    /// These numbers decide tiles, and not what is computed.
    fn among(&self, _experts: usize, _top_k: usize) -> Self {
        self.clone()
    }
}

impl Op {
    /// Returns the operator's name.
    pub fn stem(&self) -> Stem {
        match self {
            Op::GateTopk { .. } | Op::Route { .. } => Stem::GateTopk,
            Op::ExpertScan { .. } => Stem::ExpertScan,
            Op::Dispatch { .. } => Stem::Dispatch,
            Op::GroupedGemm { .. } => Stem::GroupedGemm,
            Op::Combine { .. } => Stem::Combine,
            Op::RmsNorm { .. } => Stem::RmsNorm,
            Op::RmsNormBwd { .. } => Stem::RmsNormBwd,
            Op::CombineBwd { .. } => Stem::CombineBwd,
            Op::GroupedGemmDgrad { .. } => Stem::GroupedGemmDgrad,
            Op::GroupedGemmWgrad { .. } => Stem::GroupedGemmWgrad,
            Op::GateTopkBwd { .. } => Stem::GateTopkBwd,
            Op::DispatchBwd { .. } => Stem::DispatchBwd,
            Op::CommCast { .. } => Stem::CommCast,
        }
    }

    /// Returns the name of the kernel's text: the stem, but for a kernel of two operators.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Route { .. } => "route",
            _ => self.stem().name(),
        }
    }

    /// Returns the folder of the operator, here and in `templates`.
    pub fn operator(&self) -> &'static str {
        match self {
            Op::Route { .. } => "route",
            _ => self.stem().operator(),
        }
    }

    /// Returns the entries of the kernel, in the order of their launches.
    pub fn entries(&self) -> Vec<Entry> {
        match self {
            Op::GateTopk { desc, config } => desc.entries(config),
            Op::ExpertScan { desc, config } => desc.entries(config),
            Op::Route { desc, config } => desc.entries(config),
            Op::Dispatch { desc, config } => desc.entries(config),
            Op::GroupedGemm { desc, config } => desc.entries(config),
            Op::Combine { desc, config } => desc.entries(config),
            Op::RmsNorm { desc, config } => desc.entries(config),
            Op::RmsNormBwd { desc, config } => desc.entries(config),
            Op::CombineBwd { desc, config } => desc.entries(config),
            Op::GroupedGemmDgrad { desc, config } => desc.entries(config),
            Op::GroupedGemmWgrad { desc, config } => desc.entries(config),
            Op::GateTopkBwd { desc, config } => desc.entries(config),
            Op::DispatchBwd { desc, config } => desc.entries(config),
            Op::CommCast { desc, config } => desc.entries(config),
        }
    }

    /// Returns [`Operator::flops`] of the desc.
    pub fn flops(&self, symbol: &str, tokens: f64) -> f64 {
        match self {
            Op::GateTopk { desc, .. } => desc.flops(symbol, tokens),
            Op::ExpertScan { desc, .. } => desc.flops(symbol, tokens),
            Op::Route { desc, .. } => desc.flops(symbol, tokens),
            Op::Dispatch { desc, .. } => desc.flops(symbol, tokens),
            Op::GroupedGemm { desc, .. } => desc.flops(symbol, tokens),
            Op::Combine { desc, .. } => desc.flops(symbol, tokens),
            Op::RmsNorm { desc, .. } => desc.flops(symbol, tokens),
            Op::RmsNormBwd { desc, .. } => desc.flops(symbol, tokens),
            Op::CombineBwd { desc, .. } => desc.flops(symbol, tokens),
            Op::GroupedGemmDgrad { desc, .. } => desc.flops(symbol, tokens),
            Op::GroupedGemmWgrad { desc, .. } => desc.flops(symbol, tokens),
            Op::GateTopkBwd { desc, .. } => desc.flops(symbol, tokens),
            Op::DispatchBwd { desc, .. } => desc.flops(symbol, tokens),
            Op::CommCast { desc, .. } => desc.flops(symbol, tokens),
        }
    }

    /// Returns the tiling of a GEMM; `None` for other operators.
    pub fn gemm(&self) -> Option<&GroupedGemmConfig> {
        match self {
            Op::GroupedGemm { config, .. }
            | Op::GroupedGemmDgrad { config, .. }
            | Op::GroupedGemmWgrad { config, .. } => Some(config),
            _ => None,
        }
    }

    /// Returns [`Op::gemm`] for changes.
    pub fn gemm_mut(&mut self) -> Option<&mut GroupedGemmConfig> {
        match self {
            Op::GroupedGemm { config, .. }
            | Op::GroupedGemmDgrad { config, .. }
            | Op::GroupedGemmWgrad { config, .. } => Some(config),
            _ => None,
        }
    }

    /// Returns whether this is the gate or the scan, which decide where tokens go.
    pub fn routes(&self) -> bool {
        matches!(
            self,
            Op::GateTopk { .. } | Op::ExpertScan { .. } | Op::Route { .. }
        )
    }

    /// Returns whether this belongs to the router: [`Op::routes`], its losses or its backward pass.
    pub fn of_router(&self) -> bool {
        self.routes() || matches!(self, Op::GateTopkBwd { .. })
    }

    /// Returns whether this sums everything that reaches a token: expert rows, or their gradients.
    pub fn sums_tokens(&self) -> bool {
        matches!(self, Op::Combine { .. } | Op::DispatchBwd { .. })
    }
}
