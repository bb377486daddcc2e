//! Compiler flags. This file holds every flag that can change the machine code,
//! so a fingerprint of its output is enough for a cache key.

use moesaic_kernel::CpuIsa;

/// Flags for every instruction set.
///
/// Fast math is off, so sums keep the order in which they are written.
/// Contraction of `a * b + c` is set by name, because compilers differ in their
/// default. Strict aliasing is off, because kernels read packed memory through
/// vector types. A call of a missing function is an error here and not at the
/// first launch. Unused parameters do not warn, because an inlined function has
/// one list of parameters for all layers, of which some need fewer.
const COMMON: [&str; 14] = [
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
    "-Werror=implicit-function-declaration",
    "-Wno-unused",
    "-Wno-unused-parameter",
    "-Wno-psabi",
    "-g0",
];

/// Armv8.6 includes bf16 and products of bytes; CPUs of Armv8.2 may have them.
const NEON_BF16: [&str; 1] = ["-march=armv8.2-a+bf16+i8mm"];

const AVX2: [&str; 4] = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"];

/// The red zone is off: gcc 12 copies into arrays in it with aligned stores
/// whose addresses are not aligned (seen: `vmovdqa` to 8 mod 16).
const AVX512: [&str; 6] = [
    "-mno-red-zone",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mprefer-vector-width=512",
];

/// Returns the flags of the compile step. `-march=native` is never among them,
/// so a kernel made on a login node equals one made on a compute node.
pub fn compile_flags(isa: CpuIsa) -> Vec<&'static str> {
    let features: &[&[&str]] = match isa {
        CpuIsa::Portable | CpuIsa::Neon => &[],
        CpuIsa::Avx2 => &[&AVX2],
        CpuIsa::Avx512 => &[&AVX2, &AVX512],
        CpuIsa::Avx512Bf16 => &[&AVX2, &AVX512, &["-mavx512bf16", "-mavx512vnni"]],
        CpuIsa::NeonBf16 => &[&NEON_BF16],
        CpuIsa::Amx => &[
            &AVX2,
            &AVX512,
            &["-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"],
        ],
    };
    COMMON
        .iter()
        .chain(features.iter().copied().flatten())
        .copied()
        .collect()
}

/// Returns the instruction sets of a machine architecture, by Rust's name.
pub(crate) fn isas_of(arch: &str) -> &'static [CpuIsa] {
    match arch {
        "x86_64" => &[
            CpuIsa::Portable,
            CpuIsa::Avx2,
            CpuIsa::Avx512,
            CpuIsa::Avx512Bf16,
            CpuIsa::Amx,
        ],
        "aarch64" => &[CpuIsa::Portable, CpuIsa::Neon, CpuIsa::NeonBf16],
        _ => &[CpuIsa::Portable],
    }
}

/// Returns the architecture of an instruction set; the portable one belongs to
/// the compiling machine.
pub(crate) fn arch_of(isa: CpuIsa) -> &'static str {
    match isa {
        CpuIsa::Portable => std::env::consts::ARCH,
        CpuIsa::Neon | CpuIsa::NeonBf16 => "aarch64",
        CpuIsa::Avx2 | CpuIsa::Avx512 | CpuIsa::Avx512Bf16 | CpuIsa::Amx => "x86_64",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_flag_depends_on_this_machine_or_breaks_float_rules() {
        for isa in [
            CpuIsa::Portable,
            CpuIsa::Avx2,
            CpuIsa::Avx512Bf16,
            CpuIsa::Neon,
            CpuIsa::NeonBf16,
        ] {
            let flags = compile_flags(isa).join(" ");
            for bad in ["native", "fast-math", "associative", "unsafe"] {
                assert!(!flags.contains(bad), "{flags}");
            }
        }
    }

    #[test]
    fn wider_sets_include_narrower_ones() {
        let narrow = compile_flags(CpuIsa::Avx2);
        let wide = compile_flags(CpuIsa::Avx512Bf16);
        assert!(narrow.iter().all(|flag| wide.contains(flag)));
        assert!(wide.contains(&"-mavx512bf16") && !narrow.contains(&"-mavx512bf16"));
    }
}
