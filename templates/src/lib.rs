//! Kernel templates, embedded.
//!
//! `gpu/` is written once for CUDA and HIP, `cpu/` in C11 with vector
//! extensions; `cuda/` and `rocm/` hold what only one vendor has. `prelude/`
//! has one file per dialect: types, conversions and hardware primitives as
//! named functions. The code of this crate is only the index below.

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
    "cpu/gate_topk.c",
    "cpu/expert_scan.c",
    "cpu/dispatch.c",
    "cpu/grouped_gemm.c",
    "cpu/combine.c",
];

/// Templates of the SIMT family, for CUDA and HIP alike.
pub const GPU: &[Template] = index![
    "prelude/cuda.cuh",
    "prelude/hip.hpp",
    "prelude/simt.hpp",
    "gpu/gate_topk.cu",
    "gpu/expert_scan.cu",
    "gpu/dispatch.cu",
    "gpu/grouped_gemm.cu",
    "gpu/combine.cu",
];
