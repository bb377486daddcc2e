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

#[cfg(target_arch = "x86_64")]
fn detect() -> CpuIsa {
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
        && is_x86_feature_detected!("bmi2");
    let avx512 = avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match () {
        () if avx512 && is_x86_feature_detected!("avx512bf16") && !is_intel() => CpuIsa::Avx512Bf16,
        () if avx512 => CpuIsa::Avx512,
        () if avx2 => CpuIsa::Avx2,
        () => CpuIsa::Portable,
    }
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
    CpuIsa::Neon
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn detect() -> CpuIsa {
    CpuIsa::Portable
}
