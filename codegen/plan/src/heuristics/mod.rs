//! Which tiling to use: one file per target, the same functions in each.

mod cpu;
mod cuda;
mod gpu;
mod rocm;

use crate::config::*;
use crate::desc::*;
use crate::ops::{Machine, Op, Operator};

macro_rules! operator {
    ($desc:ty, $config:ty, $variant:ident, $function:ident) => {
        impl Operator for $desc {
            type Config = $config;

            fn tiling(&self, machine: Machine) -> $config {
                match machine {
                    Machine::Cpu(core) => cpu::$function(self, core),
                    Machine::Cuda(arch) => cuda::$function(self, arch),
                    Machine::Rocm(arch) => rocm::$function(self, arch),
                }
            }

            fn with(self, config: $config) -> Op {
                Op::$variant { desc: self, config }
            }
        }
    };
}

operator!(GateTopkDesc, GateTopkConfig, GateTopk, gate_topk);
operator!(ExpertScanDesc, ExpertScanConfig, ExpertScan, expert_scan);
operator!(DispatchDesc, DispatchConfig, Dispatch, dispatch);
operator!(
    GroupedGemmDesc,
    GroupedGemmConfig,
    GroupedGemm,
    grouped_gemm
);
operator!(CombineDesc, CombineConfig, Combine, combine);
operator!(CombineBwdDesc, CombineBwdConfig, CombineBwd, combine_bwd);
operator!(
    GroupedGemmDgradDesc,
    GroupedGemmConfig,
    GroupedGemmDgrad,
    grouped_gemm_dgrad
);
operator!(
    GroupedGemmWgradDesc,
    GroupedGemmConfig,
    GroupedGemmWgrad,
    grouped_gemm_wgrad
);
operator!(
    GateTopkBwdDesc,
    GateTopkBwdConfig,
    GateTopkBwd,
    gate_topk_bwd
);
operator!(
    DispatchBwdDesc,
    DispatchBwdConfig,
    DispatchBwd,
    dispatch_bwd
);
