//! Compiler flags. Every flag that can change the machine code is here, so
//! that a fingerprint of this file's output is enough for a cache key.

use moesaic_kernel::CpuIsa;

/// Flags for every instruction set.
///
/// No fast-math: sums keep the order they are written in. Contraction of
/// `a * b + c` is asked for by name, since compilers differ in their default.
/// Kernels read packed memory through vector types, hence no strict aliasing. A
/// function that is not there is an error here and not at the first launch. An inlined
/// function has one list of parameters for all layers, of which some need not all.
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

/// Armv8.6 brings these; CPUs of Armv8.2 may have them.
const NEON_BF16: [&str; 1] = ["-march=armv8.2-a+bf16"];

const AVX2: [&str; 4] = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"];

/// gcc 12 copies into arrays in the red zone with aligned stores that the red
/// zone does not bear out (seen: `vmovdqa` to 8 mod 16), hence no red zone.
const AVX512: [&str; 6] = [
    "-mno-red-zone",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mprefer-vector-width=512",
];

/// Flags of the compile step: never `-march=native`, so that a kernel made on
/// a login node is the kernel a compute node would have made.
pub fn compile_flags(isa: CpuIsa) -> Vec<&'static str> {
    let features: &[&[&str]] = match isa {
        CpuIsa::Portable | CpuIsa::Neon => &[],
        CpuIsa::Avx2 => &[&AVX2],
        CpuIsa::Avx512 => &[&AVX2, &AVX512],
        CpuIsa::Avx512Bf16 => &[&AVX2, &AVX512, &["-mavx512bf16"]],
        CpuIsa::NeonBf16 => &[&NEON_BF16],
        CpuIsa::Amx => &[&AVX2, &AVX512, &["-mamx-tile", "-mamx-bf16"]],
    };
    COMMON
        .iter()
        .chain(features.iter().copied().flatten())
        .copied()
        .collect()
}

/// The instruction sets of a machine architecture, as Rust names it.
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

/// The architecture an instruction set is for; the portable one is for
/// whatever machine compiles it.
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
