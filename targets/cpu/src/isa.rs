//! What this machine's CPU can run.

use moesaic_kernel::CpuIsa;

/// The fastest instruction set that this CPU and its operating system run.
///
/// It is the widest one, except that AVX512-BF16 is passed over on Intel's
/// cores: they multiply pairs of bf16 at half the rate of f32 (87 and 177
/// GFLOP/s on a core of 2023), where AMD's do at twice the rate.
pub fn host_isa() -> CpuIsa {
    detect()
}

/// Whether this CPU and its operating system run code for `isa`.
#[cfg(target_arch = "x86_64")]
pub fn host_runs(isa: CpuIsa) -> bool {
    let avx2 = || {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("bmi2")
    };
    let avx512 = || {
        avx2()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
    };
    match isa {
        CpuIsa::Portable => true,
        CpuIsa::Avx2 => avx2(),
        CpuIsa::Avx512 => avx512(),
        CpuIsa::Avx512Bf16 => avx512() && is_x86_feature_detected!("avx512bf16"),
        CpuIsa::Neon | CpuIsa::NeonBf16 => false,
    }
}

/// Whether this CPU and its operating system run code for `isa`.
#[cfg(target_arch = "aarch64")]
pub fn host_runs(isa: CpuIsa) -> bool {
    match isa {
        CpuIsa::Portable | CpuIsa::Neon => true,
        CpuIsa::NeonBf16 => std::arch::is_aarch64_feature_detected!("bf16"),
        CpuIsa::Avx2 | CpuIsa::Avx512 | CpuIsa::Avx512Bf16 => false,
    }
}

/// Whether this CPU and its operating system run code for `isa`.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub fn host_runs(isa: CpuIsa) -> bool {
    isa == CpuIsa::Portable
}

#[cfg(target_arch = "x86_64")]
fn detect() -> CpuIsa {
    let fastest_first = match is_intel() {
        true => [CpuIsa::Avx512, CpuIsa::Avx512Bf16, CpuIsa::Avx2],
        false => [CpuIsa::Avx512Bf16, CpuIsa::Avx512, CpuIsa::Avx2],
    };
    fastest_first
        .into_iter()
        .find(|isa| host_runs(*isa))
        .unwrap_or(CpuIsa::Portable)
}

#[cfg(target_arch = "x86_64")]
#[allow(unused_unsafe, reason = "the intrinsic is safe in newer compilers")]
fn is_intel() -> bool {
    // SAFETY: every x86-64 CPU has the instruction.
    let leaf = unsafe { std::arch::x86_64::__cpuid(0) };
    let vendor = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
    vendor.as_flattened() == b"GenuineIntel"
}

#[cfg(target_arch = "aarch64")]
fn detect() -> CpuIsa {
    match host_runs(CpuIsa::NeonBf16) {
        true => CpuIsa::NeonBf16,
        false => CpuIsa::Neon,
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn detect() -> CpuIsa {
    CpuIsa::Portable
}
