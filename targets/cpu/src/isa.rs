//! The instruction sets that this machine's CPU runs.

use moesaic_kernel::CpuIsa;

/// Returns the fastest instruction set that this CPU and its operating system
/// run.
///
/// The widest set wins (tiles first), except that AVX512-BF16 is skipped on
/// Intel's cores: they multiply pairs of bf16 at half the rate of f32 (87 and
/// 177 GFLOP/s on a core of 2023), where AMD's cores do at twice the rate.
pub fn host_isa() -> CpuIsa {
    detect()
}

/// Returns true if this CPU and its operating system run code for `isa`.
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
    let avx512bf16 = || {
        avx512() && is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vnni")
    };
    match isa {
        CpuIsa::Portable => true,
        CpuIsa::Avx2 => avx2(),
        CpuIsa::Avx512 => avx512(),
        CpuIsa::Avx512Bf16 => avx512bf16(),
        CpuIsa::Amx => avx512bf16() && amx(),
        CpuIsa::Neon | CpuIsa::NeonBf16 => false,
    }
}

/// Returns true if this CPU and its operating system run code for `isa`.
#[cfg(target_arch = "aarch64")]
pub fn host_runs(isa: CpuIsa) -> bool {
    match isa {
        CpuIsa::Portable | CpuIsa::Neon => true,
        CpuIsa::NeonBf16 => {
            std::arch::is_aarch64_feature_detected!("bf16")
                && std::arch::is_aarch64_feature_detected!("i8mm")
        }
        CpuIsa::Avx2 | CpuIsa::Avx512 | CpuIsa::Avx512Bf16 | CpuIsa::Amx => false,
    }
}

/// Returns true if this CPU and its operating system run code for `isa`.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub fn host_runs(isa: CpuIsa) -> bool {
    isa == CpuIsa::Portable
}

#[cfg(target_arch = "x86_64")]
fn detect() -> CpuIsa {
    use CpuIsa::{Amx, Avx2, Avx512, Avx512Bf16};
    let fastest_first = if is_intel() {
        [Amx, Avx512, Avx512Bf16, Avx2]
    } else {
        [Amx, Avx512Bf16, Avx512, Avx2]
    };
    fastest_first
        .into_iter()
        .find(|isa| host_runs(*isa))
        .unwrap_or(CpuIsa::Portable)
}

/// Returns true if the CPU has tiles of bf16 and Linux lets this process use
/// them: Linux keeps the tiles of a thread only for processes that asked for
/// it.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[allow(unused_unsafe, reason = "the intrinsic is safe in newer compilers")]
fn amx() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    use std::sync::LazyLock;
    const REQUEST_STATE: libc::c_long = 0x1023; // ARCH_REQ_XCOMP_PERM
    const TILE_DATA: libc::c_long = 18;
    const BF16_AND_TILES: u32 = 1 << 22 | 1 << 24;
    static GRANTED: LazyLock<bool> = LazyLock::new(|| {
        // SAFETY: every x86-64 CPU has the instruction; leaf 7 exists if it says so.
        let known = unsafe { __cpuid(0) }.eax >= 7;
        // SAFETY: as above.
        let has = known && unsafe { __cpuid_count(7, 0) }.edx & BF16_AND_TILES == BF16_AND_TILES;
        // SAFETY: the call changes nothing but what this process may use.
        has && unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_STATE, TILE_DATA) } == 0
    });
    *GRANTED
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn amx() -> bool {
    false
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
    if host_runs(CpuIsa::NeonBf16) {
        CpuIsa::NeonBf16
    } else {
        CpuIsa::Neon
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn detect() -> CpuIsa {
    CpuIsa::Portable
}
