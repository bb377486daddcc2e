//! How products are tiled: what all families have, and what only one has.

use serde::{Deserialize, Serialize};

/// Tiling of `grouped_gemm` and of its backward products.
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
    /// Rows per thread (GPU) or per register tile (CPU); per warp in the
    /// families that have matrix units.
    pub thread_rows: usize,
    /// Columns per thread (GPU) or per register tile (CPU); per warp in the
    /// families that have matrix units.
    pub thread_columns: usize,
    /// Which unit multiplies, and what only its kernels have.
    #[serde(flatten)]
    pub family: GemmFamily,
}

/// The unit that multiplies, and with it the template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "family", rename_all = "snake_case")]
pub enum GemmFamily {
    /// The ordinary arithmetic units of a GPU: any type, any shape.
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
        /// Factors of f32 are rounded to tf32, as the spec allows.
        tf32: bool,
    },
    /// `mma.sync` for few rows: a warp reads some columns' weights from end to end.
    MmaDecode {
        /// See [`GroupedGemmConfig::gather`].
        gather: bool,
        /// Dynamic shared memory of a block in bytes.
        shared_bytes: u32,
        /// Factors of f32 are rounded to tf32, as the spec allows.
        tf32: bool,
    },
    /// `wgmma` fed by the copy engine: NVIDIA sm_90a.
    Wgmma {
        /// Tiles of the inner dimension in flight.
        stages: usize,
        /// See [`GroupedGemmConfig::gather`].
        gather: bool,
        /// Dynamic shared memory of a block in bytes.
        shared_bytes: u32,
    },
    /// Matrix-core instructions of AMD's data-centre GPUs: gfx90a, gfx94x, gfx95x.
    Mfma {
        /// See [`GroupedGemmConfig::gather`].
        gather: bool,
    },
    /// Matrix-core instructions for few rows: a wave reads some columns' weights from end
    /// to end.
    MfmaDecode {
        /// See [`GroupedGemmConfig::gather`].
        gather: bool,
    },
    /// Wave matrix instructions of AMD's gfx11.
    Wmma {
        /// See [`GroupedGemmConfig::gather`].
        gather: bool,
    },
    /// Vector registers of a CPU: any type, any shape.
    Vectors(CpuGemm),
    /// AMX tiles of bf16: x86-64 server CPUs.
    Tiles(CpuGemm),
}

/// What products on a CPU have, whatever multiplies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuGemm {
    /// See [`GroupedGemmConfig::gather`].
    pub gather: bool,
    /// The kernel reads weights in an order of its own, which entries before the
    /// product make once: `[experts, panels, depth, columns of a panel]`.
    pub packed: bool,
    /// Calls of up to so many tokens have blocks of `decode_columns` columns instead,
    /// so that there are enough of them for many threads; 0 where none have.
    pub decode_tokens: usize,
    /// At most `tile_columns`.
    pub decode_columns: usize,
    /// Memory of a thread in bytes.
    pub shared_bytes: u32,
}

impl GroupedGemmConfig {
    /// The up half reads rows straight from x, so that no step dispatches.
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

    /// See [`CpuGemm::packed`].
    pub fn packed(&self) -> bool {
        self.family.cpu().is_some_and(|cpu| cpu.packed)
    }

    /// Dynamic shared memory of a block in bytes; on a CPU memory of a thread.
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

    /// Columns that a block of a bias gradient sums: one per thread, on a CPU
    /// a few vectors.
    pub fn bias_columns(&self) -> usize {
        match self.threads {
            1 => 256,
            threads => threads as usize,
        }
    }
}

impl GemmFamily {
    /// The name in templates and tables: `mma`.
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

    /// What only CPUs have.
    pub fn cpu(&self) -> Option<&CpuGemm> {
        match self {
            GemmFamily::Vectors(cpu) | GemmFamily::Tiles(cpu) => Some(cpu),
            _ => None,
        }
    }

    /// The same, to change it.
    pub fn cpu_mut(&mut self) -> Option<&mut CpuGemm> {
        match self {
            GemmFamily::Vectors(cpu) | GemmFamily::Tiles(cpu) => Some(cpu),
            _ => None,
        }
    }
}
