//! The tilings of GEMMs: the fields that all families have, and those of one family.

use serde::{Deserialize, Serialize};

/// The tiling of `grouped_gemm` and of its backward GEMMs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupedGemmConfig {
    /// Threads per block; 1 on a CPU.
    pub threads: u32,
    /// Rows per block; a tile never crosses experts.
    pub tile_rows: usize,
    /// Output columns per block (of gate and of up alike).
    pub tile_columns: usize,
    /// Elements of the inner dimension staged at a time.
    pub tile_depth: usize,
    /// Rows per thread (SIMT) or per register tile (CPU); per warp or wave in the families on
    /// tensor or matrix cores.
    pub thread_rows: usize,
    /// Columns per thread (SIMT) or per register tile (CPU); per warp or wave in the families on
    /// tensor or matrix cores.
    pub thread_columns: usize,
    /// The family, with the fields that only its kernels have.
    #[serde(flatten)]
    pub family: GemmFamily,
}

/// The way to multiply, which selects the template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "family", rename_all = "snake_case")]
pub enum GemmFamily {
    /// CUDA cores, or the vector ALUs of an AMD GPU: any type, any shape.
    Simt {
        /// See [`GroupedGemmConfig::gather`].
        gather: bool,
    },
    /// `mma.sync` with `cp.async` and `ldmatrix`: NVIDIA sm_80 and later.
    Mma {
        /// Tiles of the inner dimension in flight.
        stages: usize,
        /// See [`GroupedGemmConfig::gather`].
        gather: bool,
        /// Dynamic shared memory of a block in bytes.
        shared_bytes: u32,
        /// f32 operands are rounded to tf32, as the spec allows.
        tf32: bool,
    },
    /// `mma.sync` for decode calls: a warp reads the weights of some columns end to end.
    MmaDecode {
        /// See [`GroupedGemmConfig::gather`].
        gather: bool,
        /// Dynamic shared memory of a block in bytes.
        shared_bytes: u32,
        /// f32 operands are rounded to tf32, as the spec allows.
        tf32: bool,
    },
    /// `wgmma` with operands by TMA: NVIDIA sm_90a.
    Wgmma {
        /// Tiles of the inner dimension in flight.
        stages: usize,
        /// See [`GroupedGemmConfig::gather`].
        gather: bool,
        /// Dynamic shared memory of a block in bytes.
        shared_bytes: u32,
    },
    /// MFMA instructions of the matrix cores of AMD data-centre GPUs: gfx90a, gfx94x, gfx95x.
    Mfma {
        /// See [`GroupedGemmConfig::gather`].
        gather: bool,
    },
    /// MFMA for decode calls: a wave reads the weights of some columns end to end.
    MfmaDecode {
        /// See [`GroupedGemmConfig::gather`].
        gather: bool,
    },
    /// WMMA instructions of the matrix cores of AMD gfx11.
    Wmma {
        /// See [`GroupedGemmConfig::gather`].
        gather: bool,
    },
    /// Vector registers of a CPU: any type, any shape.
    Vectors(CpuGemm),
    /// AMX tiles of bf16: x86-64 server CPUs.
    Tiles(CpuGemm),
}

/// The fields of all CPU GEMMs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuGemm {
    /// See [`GroupedGemmConfig::gather`].
    pub gather: bool,
    /// The kernel reads packed weights, `[experts, panels, depth, columns of a panel]`, which
    /// entries before the GEMM make once.
    pub packed: bool,
    /// The largest call whose blocks have `decode_columns` columns instead, so that many threads
    /// have a block; 0 without such calls.
    pub decode_tokens: usize,
    /// Columns of a block in those calls; at most `tile_columns`.
    pub decode_columns: usize,
    /// Scratch memory of a thread in bytes.
    pub shared_bytes: u32,
}

impl GroupedGemmConfig {
    /// Returns whether the up half reads rows straight from x, so that no step dispatches.
    pub fn gather(&self) -> bool {
        match &self.family {
            GemmFamily::Vectors(cpu) | GemmFamily::Tiles(cpu) => cpu.gather,
            GemmFamily::Simt { gather }
            | GemmFamily::Mma { gather, .. }
            | GemmFamily::MmaDecode { gather, .. }
            | GemmFamily::Wgmma { gather, .. }
            | GemmFamily::Mfma { gather }
            | GemmFamily::MfmaDecode { gather }
            | GemmFamily::Wmma { gather } => *gather,
        }
    }

    /// Returns [`CpuGemm::packed`]; false on GPUs.
    pub fn packed(&self) -> bool {
        self.family.cpu().is_some_and(|cpu| cpu.packed)
    }

    /// Returns the dynamic shared memory of a block in bytes; on a CPU the scratch memory of a
    /// thread.
    pub fn shared_bytes(&self) -> u32 {
        match &self.family {
            GemmFamily::Mma { shared_bytes, .. }
            | GemmFamily::MmaDecode { shared_bytes, .. }
            | GemmFamily::Wgmma { shared_bytes, .. } => *shared_bytes,
            GemmFamily::Vectors(cpu) | GemmFamily::Tiles(cpu) => cpu.shared_bytes,
            GemmFamily::Simt { .. }
            | GemmFamily::Mfma { .. }
            | GemmFamily::MfmaDecode { .. }
            | GemmFamily::Wmma { .. } => 0,
        }
    }

    /// Returns the columns of a bias gradient that a block sums: one per thread, on a CPU a few
    /// vectors.
    pub fn bias_columns(&self) -> usize {
        match self.threads {
            1 => 256,
            threads => threads as usize,
        }
    }
}

impl GemmFamily {
    /// Returns the name in templates and tables: `mma`.
    pub fn name(&self) -> &'static str {
        match self {
            GemmFamily::Simt { .. } => "simt",
            GemmFamily::Mma { .. } => "mma",
            GemmFamily::MmaDecode { .. } => "mma_decode",
            GemmFamily::Wgmma { .. } => "wgmma",
            GemmFamily::Mfma { .. } => "mfma",
            GemmFamily::MfmaDecode { .. } => "mfma_decode",
            GemmFamily::Wmma { .. } => "wmma",
            GemmFamily::Vectors(_) => "vectors",
            GemmFamily::Tiles(_) => "tiles",
        }
    }

    /// Returns the target whose tensor or matrix cores it needs; `None` for a family of all GPUs or
    /// of CPUs.
    pub fn vendor(&self) -> Option<&'static str> {
        match self {
            GemmFamily::Mma { .. } | GemmFamily::MmaDecode { .. } | GemmFamily::Wgmma { .. } => {
                Some("cuda")
            }
            GemmFamily::Mfma { .. } | GemmFamily::MfmaDecode { .. } | GemmFamily::Wmma { .. } => {
                Some("rocm")
            }
            GemmFamily::Simt { .. } | GemmFamily::Vectors(_) | GemmFamily::Tiles(_) => None,
        }
    }

    /// Returns the fields that only CPU GEMMs have.
    pub fn cpu(&self) -> Option<&CpuGemm> {
        match self {
            GemmFamily::Vectors(cpu) | GemmFamily::Tiles(cpu) => Some(cpu),
            _ => None,
        }
    }

    /// Returns [`GemmFamily::cpu`] for changes.
    pub fn cpu_mut(&mut self) -> Option<&mut CpuGemm> {
        match self {
            GemmFamily::Vectors(cpu) | GemmFamily::Tiles(cpu) => Some(cpu),
            _ => None,
        }
    }
}
