//! The operators of a layer. Each has its desc (what a kernel computes), its
//! config (how it is tiled), the tilings for every machine, the entries (what
//! is launched with what) and the steps of a pass side by side; backward beside
//! forward.

mod machine;

pub use machine::{Core, Machine};

use crate::config::*;
use crate::desc::*;
use moesaic_kernel::Stem;
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
}

/// A desc: every machine has a tiling for it.
pub trait Operator: Sized {
    /// Its tiling.
    type Config;

    /// The tiling on a machine.
    fn tiling(&self, machine: Machine) -> Self::Config;

    /// It with a tiling.
    fn with(self, config: Self::Config) -> Op;

    /// It with the tiling on a machine.
    fn on(self, machine: Machine) -> Op {
        let config = self.tiling(machine);
        self.with(config)
    }
}

impl Op {
    /// The operator's name.
    pub fn stem(&self) -> Stem {
        match self {
            Op::GateTopk { .. } => Stem::GateTopk,
            Op::ExpertScan { .. } => Stem::ExpertScan,
            Op::Dispatch { .. } => Stem::Dispatch,
            Op::GroupedGemm { .. } => Stem::GroupedGemm,
            Op::Combine { .. } => Stem::Combine,
            Op::CombineBwd { .. } => Stem::CombineBwd,
            Op::GroupedGemmDgrad { .. } => Stem::GroupedGemmDgrad,
            Op::GroupedGemmWgrad { .. } => Stem::GroupedGemmWgrad,
            Op::GateTopkBwd { .. } => Stem::GateTopkBwd,
            Op::DispatchBwd { .. } => Stem::DispatchBwd,
        }
    }
}

impl Op {
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
        matches!(self, Op::GateTopk { .. } | Op::ExpertScan { .. })
    }
}
