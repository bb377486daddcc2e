//! What this machine's CPU can run.

use moesaic_kernel::CpuIsa;

/// The widest instruction set that this CPU and its operating system run.
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
        () if avx512 && is_x86_feature_detected!("avx512bf16") => CpuIsa::Avx512Bf16,
        () if avx512 => CpuIsa::Avx512,
        () if avx2 => CpuIsa::Avx2,
        () => CpuIsa::Portable,
    }
}

#[cfg(target_arch = "aarch64")]
fn detect() -> CpuIsa {
    CpuIsa::Neon
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn detect() -> CpuIsa {
    CpuIsa::Portable
}
