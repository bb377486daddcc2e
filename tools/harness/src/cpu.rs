//! A plan's kernels on this CPU.

use crate::kept::Kept;
use crate::{Loaded, quick};
use moesaic_cpu::CpuDevice;
use moesaic_emit::emit_layer;
use moesaic_kernel::{CpuIsa, KernelSource, Target};
use moesaic_plan::LayerPlan;
use moesaic_target::{Artifact, CompileOptions, Compiler, Device};
use std::sync::{Arc, LazyLock};

/// The instruction sets this machine runs, narrowest first.
pub fn isas() -> Vec<CpuIsa> {
    let host = host();
    let narrower = match host {
        CpuIsa::Avx2 => &[CpuIsa::Portable][..],
        CpuIsa::Avx512 => &[CpuIsa::Portable, CpuIsa::Avx2],
        CpuIsa::Amx => &[CpuIsa::Portable, CpuIsa::Avx2, CpuIsa::Avx512],
        CpuIsa::Avx512Bf16 => &[CpuIsa::Portable, CpuIsa::Avx2, CpuIsa::Avx512],
        CpuIsa::Portable => &[],
        CpuIsa::Neon => &[CpuIsa::Portable],
        CpuIsa::NeonBf16 => &[CpuIsa::Portable, CpuIsa::Neon],
    };
    let mut list = narrower.to_vec();
    list.push(host);
    #[cfg(target_arch = "x86_64")]
    if matches!(host, CpuIsa::Avx512 | CpuIsa::Amx) && std::is_x86_feature_detected!("avx512bf16") {
        list.push(CpuIsa::Avx512Bf16);
    }
    list
}

/// The instruction set that is chosen on this machine.
pub fn host() -> CpuIsa {
    moesaic_cpu::host_isa()
}

/// Its memory is NaN where nobody wrote.
pub fn device(threads: usize) -> CpuDevice {
    CpuDevice::with_threads(threads).unwrap().poisoned()
}

/// The kernels of a plan.
pub fn load(plan: &LayerPlan, threads: usize) -> Loaded {
    let device = device(threads);
    let sources = emit_layer(plan).unwrap();
    let modules = sources
        .iter()
        .map(|source| device.load(&compiled(source), &source.entries).unwrap());
    let modules = modules.collect();
    (Arc::new(device), modules)
}

/// In a hurry; for what is chosen on this machine, and where nothing else is, without a word of
/// warning.
pub fn compiled(source: &KernelSource) -> Artifact {
    static COMPILER: LazyLock<Kept> = LazyLock::new(|| Kept(quick::cpu()));
    let artifact = COMPILER.compile(source, &CompileOptions::default());
    let artifact = artifact.unwrap_or_else(|error| panic!("{error}"));
    if [host(), CpuIsa::Portable]
        .map(Target::Cpu)
        .contains(&source.target)
    {
        assert_eq!(artifact.report.log, "", "{}", source.name);
    }
    artifact
}
