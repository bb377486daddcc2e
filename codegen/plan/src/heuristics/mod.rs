//! Which tiling to use: one file per target, the same functions in each.

pub mod cpu;
pub mod cuda;
mod gpu;
pub mod rocm;

use crate::{CacheClass, KernelConfig, KernelDesc};
use moesaic_kernel::Target;

/// The tiling of `desc` on `target`; on a CPU with the caches that are assumed.
pub fn choose(desc: &KernelDesc, target: Target) -> KernelConfig {
    choose_for(desc, target, CacheClass::default())
}

/// The tiling of `desc` on `target`, of which `caches` are those of a CPU.
pub fn choose_for(desc: &KernelDesc, target: Target, caches: CacheClass) -> KernelConfig {
    macro_rules! by_stem {
        ($target:ident, $arch:expr) => {
            match desc {
                KernelDesc::GateTopk(d) => KernelConfig::GateTopk($target::gate_topk(d, $arch)),
                KernelDesc::ExpertScan(d) => {
                    KernelConfig::ExpertScan($target::expert_scan(d, $arch))
                }
                KernelDesc::Dispatch(d) => KernelConfig::Dispatch($target::dispatch(d, $arch)),
                KernelDesc::GroupedGemm(d) => {
                    KernelConfig::GroupedGemm($target::grouped_gemm(d, $arch))
                }
                KernelDesc::Combine(d) => KernelConfig::Combine($target::combine(d, $arch)),
                KernelDesc::CombineBwd(d) => {
                    KernelConfig::CombineBwd($target::combine_bwd(d, $arch))
                }
                KernelDesc::GroupedGemmDgrad(d) => {
                    KernelConfig::GroupedGemm($target::grouped_gemm_dgrad(d, $arch))
                }
                KernelDesc::GroupedGemmWgrad(d) => {
                    KernelConfig::GroupedGemm($target::grouped_gemm_wgrad(d, $arch))
                }
                KernelDesc::GateTopkBwd(d) => {
                    KernelConfig::GateTopkBwd($target::gate_topk_bwd(d, $arch))
                }
                KernelDesc::DispatchBwd(d) => {
                    KernelConfig::DispatchBwd($target::dispatch_bwd(d, $arch))
                }
            }
        };
    }
    match target.hardware() {
        Target::Cpu(isa) => by_stem!(cpu, cpu::Core { isa, caches }),
        Target::Cuda(arch) => by_stem!(cuda, arch),
        Target::Rocm(arch) => by_stem!(rocm, arch),
        Target::Sim(_) => unreachable!("a simulator stands for a GPU"),
    }
}
