//! Kernel templates, embedded.
//!
//! `gpu/` is written once for CUDA and HIP, `cpu/` in C11 with vector
//! extensions; `cuda/` and `rocm/` hold what only one vendor has. `prelude/`
//! has types, conversions and hardware primitives as named functions: those of
//! a dialect in `prelude/{cuda,hip,sim}`, what is built on them beside. The code
//! of this crate is only the index below.

/// A template: its name, which is its path in this folder, and its text.
pub type Template = (&'static str, &'static str);

macro_rules! index {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../", $name, ".tera")))),*]
    };
}

/// Templates of the C family.
pub const CPU: &[Template] = index![
    "prelude/cpu.h",
    "prelude/cpu_vector.h",
    "prelude/cpu_bf16.h",
    "prelude/cpu_f16.h",
    "prelude/cpu_half.h",
    "prelude/cpu_exp.h",
    "prelude/cpu_probability.h",
    "prelude/cpu_multiply.h",
    "prelude/cpu_functions.h",
    "prelude/cpu_pack.h",
    "prelude/cpu_activation.h",
    "prelude/cpu_activation_slope.h",
    "cpu/gate_topk.c",
    "cpu/gate_logits.c",
    "cpu/gate_select.c",
    "cpu/expert_scan.c",
    "cpu/dispatch.c",
    "cpu/grouped_gemm.c",
    "cpu/grouped_gemm_dgrad.c",
    "cpu/grouped_gemm_wgrad.c",
    "cpu/gemm_block.c",
    "cpu/gemm_slice.c",
    "cpu/gemm_registers.c",
    "cpu/gemm_many_rows.c",
    "cpu/gemm_few_rows.c",
    "cpu/combine.c",
    "cpu/combine_bwd.c",
    "cpu/dispatch_bwd.c",
];

/// Templates of GPU kernels: those for CUDA and HIP alike, then each vendor's own.
pub const GPU: &[Template] = index![
    "prelude/base.hpp",
    "prelude/bf16_bits.hpp",
    "prelude/cuda/base.cuh",
    "prelude/cuda/async_copy.cuh",
    "prelude/cuda/matrix.cuh",
    "prelude/cuda/matrix_store.cuh",
    "prelude/cuda/mma.cuh",
    "prelude/cuda/shared.cuh",
    "prelude/cuda/warp.cuh",
    "prelude/cuda/mbarrier.cuh",
    "prelude/cuda/cluster.cuh",
    "prelude/cuda/tma.cuh",
    "prelude/cuda/tma_store.cuh",
    "prelude/cuda/wgmma.cuh",
    "prelude/hip/base.hpp",
    "prelude/hip/warp.hpp",
    "prelude/hip/mfma.hpp",
    "prelude/hip/wmma.hpp",
    "prelude/sim/base.hpp",
    "prelude/sim/machine.hpp",
    "prelude/sim/warp.hpp",
    "prelude/sim/mfma.hpp",
    "prelude/sim/wmma.hpp",
    "prelude/warp.hpp",
    "prelude/warp_max.hpp",
    "prelude/order.hpp",
    "prelude/math/exp.hpp",
    "prelude/math/log.hpp",
    "prelude/math/erf.hpp",
    "prelude/math/pow.hpp",
    "prelude/math/functions.hpp",
    "prelude/activation.hpp",
    "prelude/activation_slope.hpp",
    "prelude/product.hpp",
    "prelude/slab.hpp",
    "gpu/gate_topk.cu",
    "gpu/gate_logits.cu",
    "gpu/gate_select.cu",
    "gpu/gate_scores.cu",
    "gpu/expert_scan.cu",
    "gpu/scan_offsets.cu",
    "gpu/scan_places.cu",
    "gpu/scan_ranks.cu",
    "gpu/dispatch.cu",
    "gpu/grouped_gemm.cu",
    "gpu/gemm_tiles.cu",
    "gpu/gemm_clamp.cu",
    "gpu/gemm_activation.cu",
    "gpu/gemm_activation_bwd.cu",
    "gpu/grouped_gemm_dgrad.cu",
    "gpu/grouped_gemm_wgrad.cu",
    "gpu/wgrad_bias.cu",
    "gpu/combine.cu",
    "gpu/combine_bwd.cu",
    "gpu/dispatch_bwd.cu",
    "cuda/grouped_gemm_mma.cu",
    "cuda/grouped_gemm_wgmma.cu",
    "rocm/grouped_gemm_mfma.cu",
    "rocm/grouped_gemm_wmma.cu",
    "rocm/gemm_header.cu",
    "rocm/gemm_constants.cu",
    "rocm/gemm_stage.cu",
    "rocm/gemm_kernel.cu",
];
