//! The table of GPU architectures: one row each. Tilings, templates, compilers, devices, simulators
//! and reports read it, so an architecture of a known kind is one more row.

use std::fmt;

/// An NVIDIA architecture. `sm_90a` is compute capability 9.0, suffix `a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CudaArch {
    /// Compute capability times ten: 90 for 9.0.
    pub capability: u16,
    /// `a` (this architecture only), `f` (its family) or none.
    pub suffix: Option<char>,
}

/// An AMD architecture by its LLVM name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RocmArch {
    /// The LLVM processor name: `gfx942`.
    pub name: &'static str,
}

/// The properties of a GPU architecture that something outside its own templates depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArchCaps {
    /// Its GPUs, as people say them: `h100`. An architecture with a suffix has them where its text
    /// is the faster one.
    pub gpus: &'static [&'static str],
    /// The lanes of a warp, or of a wave in the mode that kernels use.
    pub wave: u32,
    /// The matrix instructions that kernels use.
    pub matrix: MatrixUnit,
    /// Whether three products of tf32 are faster than one of f32.
    pub fast_tf32: bool,
    /// The shared memory that a block can have, in bytes.
    pub block_shared: u32,
    /// The banks of shared memory, of four bytes each.
    pub shared_banks: u32,
    /// The resources of one multiprocessor or compute unit, where a few numbers describe them.
    pub unit: Option<UnitCaps>,
    /// Whether one instruction rounds f32 to bf16.
    pub bf16_rounding: bool,
    /// Whether one instruction finds the largest value of a warp.
    pub warp_max: bool,
    /// Whether there are clusters of blocks, and TMA with its tensor maps.
    pub clusters: bool,
    /// Whether blocks of a launch may start before the launch before it has ended.
    pub dependent_launches: bool,
    /// The accelerator complex dies (XCDs) that the hardware deals blocks out to, each with an L2
    /// cache of its own, on the largest GPU of the architecture; 1 for a GPU with one cache.
    pub dies: u32,
    /// The first release of clang that compiles for it; 0 for NVIDIA's, which NVRTC lists itself.
    pub clang: u32,
}

/// The matrix instructions of an architecture, as far as kernels use them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixUnit {
    /// None: GEMMs run on CUDA cores or what AMD has in their place.
    None,
    /// `mma.sync` of NVIDIA's tensor cores, for f16, bf16 and tf32, with operands by `cp.async`.
    Mma,
    /// `wgmma` with operands by TMA, and [`MatrixUnit::Mma`].
    Wgmma,
    /// MFMA of AMD's data-centre GPUs.
    Mfma(Mfma),
    /// WMMA of RDNA 3, for f16 and bf16.
    Wmma,
}

/// The variants of MFMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mfma {
    /// Whether bf16 instructions are as deep as those of f16. GEMMs use MFMA only where they are.
    pub bf16: bool,
    /// Whether instructions of 16-bit types take eight elements of each lane, not four.
    pub wide: bool,
    /// Whether instructions of 16-bit types read subnormal numbers as zero.
    pub flushes: bool,
}

/// The resources of one multiprocessor or compute unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitCaps {
    /// The threads that it holds.
    pub threads: u32,
    /// The blocks that it holds.
    pub blocks: u32,
    /// The registers that it holds, of 32 bits.
    pub registers: u32,
    /// The bytes of shared memory that all its blocks have together.
    pub shared: u32,
    /// The bytes of shared memory that the system takes of each block.
    pub reserved: u32,
    /// The registers in which a warp is given its own.
    pub granule: u32,
}

const KB: u32 = 1 << 10;

// ---- NVIDIA ----

/// The first generation, from which all others say how they differ.
const VOLTA: ArchCaps = ArchCaps {
    gpus: &[],
    wave: 32,
    matrix: MatrixUnit::None,
    fast_tf32: false,
    block_shared: 96 * KB,
    shared_banks: 32,
    unit: None,
    bf16_rounding: false,
    warp_max: false,
    clusters: false,
    dependent_launches: false,
    dies: 1,
    clang: 0,
};

const AMPERE: ArchCaps = ArchCaps {
    matrix: MatrixUnit::Mma,
    bf16_rounding: true,
    warp_max: true,
    ..VOLTA
};

const HOPPER: ArchCaps = ArchCaps {
    fast_tf32: true,
    clusters: true,
    dependent_launches: true,
    ..AMPERE.multiprocessor(2048, 32, 228)
};

/// Hopper with `wgmma`, which no later architecture has.
const HOPPER_A: ArchCaps = ArchCaps {
    matrix: MatrixUnit::Wgmma,
    ..HOPPER
};

const BLACKWELL: ArchCaps = HOPPER;

/// Thor, of the Jetson boards.
const THOR: ArchCaps = ArchCaps {
    fast_tf32: false,
    ..BLACKWELL.multiprocessor(1536, 24, 228)
};

/// Blackwell of workstations.
const SMALL_BLACKWELL: ArchCaps = THOR.multiprocessor(1536, 24, 100);

/// An architecture of NVIDIA.
pub(crate) struct CudaRow {
    pub arch: CudaArch,
    pub caps: ArchCaps,
}

const fn cuda(capability: u16, suffix: Option<char>, caps: ArchCaps) -> CudaRow {
    CudaRow {
        arch: CudaArch { capability, suffix },
        caps,
    }
}

/// The architectures, in the order of their capabilities.
#[rustfmt::skip]
pub(crate) const CUDA: [CudaRow; 22] = [
    cuda(70, None, VOLTA.early_multiprocessor(2048, 32, 96).of(&["v100"])),
    cuda(72, None, VOLTA),
    cuda(75, None, VOLTA.early_multiprocessor(1024, 16, 64).of(&["t4", "rtx2080"])),
    cuda(80, None, AMPERE.multiprocessor(2048, 32, 164).fast_tf32().of(&["a100", "a800", "a30"])),
    cuda(86, None, AMPERE.multiprocessor(1536, 16, 100).of(&["a10", "a40", "a6000", "rtx3090"])),
    cuda(87, None, AMPERE.multiprocessor(1536, 16, 164)),
    cuda(88, None, AMPERE.multiprocessor(1536, 16, 100)),
    cuda(89, None, AMPERE.multiprocessor(1536, 24, 100).of(&["l4", "l40", "l40s", "rtx4090"])),
    cuda(90, None, HOPPER),
    cuda(90, Some('a'), HOPPER_A.of(&["h100", "h200", "h800", "h20", "gh200"])),
    cuda(100, None, BLACKWELL),
    cuda(100, Some('a'), BLACKWELL.of(&["b200", "gb200"])),
    cuda(100, Some('f'), BLACKWELL),
    cuda(103, None, BLACKWELL),
    cuda(103, Some('a'), BLACKWELL.of(&["b300", "gb300"])),
    cuda(110, None, THOR),
    cuda(110, Some('a'), THOR),
    cuda(120, None, SMALL_BLACKWELL),
    cuda(120, Some('a'), SMALL_BLACKWELL.of(&["rtx5090"])),
    cuda(120, Some('f'), SMALL_BLACKWELL),
    cuda(121, None, SMALL_BLACKWELL),
    cuda(121, Some('a'), SMALL_BLACKWELL),
];

// ---- AMD ----

/// MFMA as gfx90a and gfx942 have it.
const MFMA: Mfma = Mfma {
    bf16: true,
    wide: false,
    flushes: false,
};

/// Data-centre GPUs.
const CDNA: ArchCaps = ArchCaps {
    wave: 64,
    matrix: MatrixUnit::Mfma(MFMA),
    block_shared: 64 * KB,
    clang: 14,
    ..VOLTA
};

const CDNA1: ArchCaps = ArchCaps {
    matrix: MatrixUnit::Mfma(Mfma {
        bf16: false,
        ..MFMA
    }),
    ..CDNA
};

const CDNA2: ArchCaps = ArchCaps {
    matrix: MatrixUnit::Mfma(Mfma {
        flushes: true,
        ..MFMA
    }),
    ..CDNA
};

const CDNA3: ArchCaps = ArchCaps {
    dies: 8,
    clang: 17,
    ..CDNA
};

const CDNA4: ArchCaps = ArchCaps {
    matrix: MatrixUnit::Mfma(Mfma { wide: true, ..MFMA }),
    shared_banks: 64,
    clang: 20,
    ..CDNA3
};

/// GPUs of workstations. RDNA has two units in a work-group processor, which [`UnitCaps`] does not
/// describe.
const RDNA2: ArchCaps = ArchCaps {
    wave: 32,
    matrix: MatrixUnit::None,
    ..CDNA
};

const RDNA3: ArchCaps = ArchCaps {
    matrix: MatrixUnit::Wmma,
    clang: 17,
    ..RDNA2
};

/// Its WMMA has other layouts than that of RDNA 3, and no kernel yet.
const RDNA4: ArchCaps = ArchCaps { clang: 19, ..RDNA2 };

/// An architecture of AMD.
pub(crate) struct RocmRow {
    pub arch: RocmArch,
    pub caps: ArchCaps,
}

const fn rocm(name: &'static str, caps: ArchCaps) -> RocmRow {
    RocmRow {
        arch: RocmArch { name },
        caps,
    }
}

/// The architectures by their LLVM processor names.
#[rustfmt::skip]
pub(crate) const ROCM: [RocmRow; 9] = [
    rocm("gfx908", CDNA1.compute_unit(40, 256, 64).of(&["mi100"])),
    rocm("gfx90a", CDNA2.compute_unit(32, 512, 64).of(&["mi210", "mi250", "mi250x"])),
    rocm("gfx942", CDNA3.compute_unit(32, 512, 64).of(&["mi300x", "mi325x", "mi300a"])),
    rocm("gfx950", CDNA4.compute_unit(32, 512, 160).of(&["mi350x", "mi355x"])),
    rocm("gfx1030", RDNA2.of(&["rx6900xt"])),
    rocm("gfx1100", RDNA3.of(&["rx7900xtx"])),
    rocm("gfx1101", RDNA3),
    rocm("gfx1200", RDNA4),
    rocm("gfx1201", RDNA4.of(&["rx9070xt"])),
];

/// The words of a row: what an architecture has beside its generation.
impl ArchCaps {
    const fn of(mut self, gpus: &'static [&'static str]) -> ArchCaps {
        self.gpus = gpus;
        self
    }

    const fn fast_tf32(mut self) -> ArchCaps {
        self.fast_tf32 = true;
        self
    }

    /// Returns the architecture with this multiprocessor, of which the system takes 1 KB of shared
    /// memory for each block: CUDA C++ Programming Guide, "Technical Specifications per Compute
    /// Capability", and arch_traits.h of NVIDIA's CCCL.
    const fn multiprocessor(self, threads: u32, blocks: u32, shared: u32) -> ArchCaps {
        self.holding(UnitCaps {
            threads,
            blocks,
            registers: 65536,
            shared: shared * KB,
            reserved: KB,
            granule: 256,
        })
    }

    /// Returns the same where the system takes nothing.
    const fn early_multiprocessor(self, threads: u32, blocks: u32, shared: u32) -> ArchCaps {
        self.holding(UnitCaps {
            threads,
            blocks,
            registers: 65536,
            shared: shared * KB,
            reserved: 0,
            granule: 256,
        })
    }

    /// Returns the architecture with this compute unit: waves, registers of a lane and LDS by AMD's
    /// guides of instruction sets.
    const fn compute_unit(self, waves: u32, registers: u32, shared: u32) -> ArchCaps {
        self.holding(UnitCaps {
            threads: waves * 64,
            blocks: waves,
            registers: 4 * 64 * registers,
            shared: shared * KB,
            reserved: 0,
            granule: 64 * 8,
        })
    }

    const fn holding(mut self, unit: UnitCaps) -> ArchCaps {
        self.block_shared = unit.shared - unit.reserved;
        self.unit = Some(unit);
        self
    }
}

impl ArchCaps {
    /// Returns the variants of MFMA; `None` for an architecture without.
    pub const fn mfma(&self) -> Option<Mfma> {
        match self.matrix {
            MatrixUnit::Mfma(mfma) => Some(mfma),
            _ => None,
        }
    }
}

impl CudaArch {
    /// Returns whether a GPU of this architecture runs binaries for `asked`: the same major
    /// capability, a minor one at most its own, and for suffixed architectures the very same (`a`)
    /// or its family (`f`).
    pub fn runs(self, asked: CudaArch) -> bool {
        let family = self.capability / 10 == asked.capability / 10;
        match asked.suffix {
            Some('a') => self.capability == asked.capability,
            _ => family && asked.capability <= self.capability,
        }
    }
}

impl fmt::Display for CudaArch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}", self.capability)?;
        self.suffix.map_or(Ok(()), |suffix| write!(f, "{suffix}"))
    }
}

impl CudaArch {
    /// Returns the row of the architecture; of one that the table does not have, the row of the
    /// newest before it.
    pub fn caps(self) -> &'static ArchCaps {
        let until = CUDA.partition_point(|row| row.arch <= self);
        &CUDA[until.saturating_sub(1)].caps
    }

    /// Returns whether the table has the architecture.
    pub fn is_known(self) -> bool {
        CUDA.iter().any(|row| row.arch == self)
    }
}

impl RocmArch {
    /// Returns the row of the architecture; of one that the table does not have, the first row.
    pub fn caps(self) -> &'static ArchCaps {
        let row = ROCM.iter().find(|row| row.arch == self);
        &row.unwrap_or(&ROCM[0]).caps
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Target;
    use std::collections::BTreeSet;

    #[test]
    fn every_architecture_has_a_row_of_its_own() {
        let ascending = CUDA.windows(2).all(|rows| rows[0].arch < rows[1].arch);
        assert!(ascending, "the search takes them to be");
        for row in &CUDA {
            assert_eq!(*row.arch.caps(), row.caps, "{}", row.arch);
        }
        for row in &ROCM {
            assert_eq!(*row.arch.caps(), row.caps, "{}", row.arch.name);
        }
        let newer = CudaArch {
            capability: 130,
            suffix: None,
        };
        assert_eq!(*newer.caps(), CUDA[CUDA.len() - 1].caps);
    }

    #[test]
    fn a_gpu_has_one_architecture() {
        let gpus = |target: Target| target.caps().map_or(&[][..], |caps| caps.gpus);
        let real = Target::all()
            .into_iter()
            .filter(|target| target.hardware() == *target);
        let all: Vec<&str> = real.flat_map(gpus).copied().collect();
        let different: BTreeSet<_> = all.iter().collect();
        assert_eq!(different.len(), all.len(), "{all:?}");
        assert!(all.len() > 30);
    }

    /// Values of data sheets that plans, simulators and `inspect` depend on.
    #[test]
    fn rows_are_those_of_the_data_sheets() {
        let caps = |name: &str| *name.parse::<Target>().unwrap().caps().unwrap();
        let shared = |backend: &str, names: [&str; 6]| {
            names.map(|name| caps(&format!("{backend}:{name}")).block_shared >> 10)
        };
        let early = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_87", "sm_89"];
        assert_eq!(shared("cuda", early), [96, 64, 163, 99, 163, 99]);
        let later = ["sm_90", "sm_90a", "sm_100a", "sm_110a", "sm_120a", "sm_121"];
        assert_eq!(shared("sim", later), [227, 227, 227, 227, 99, 99]);
        let amd = ["gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"];
        assert_eq!(shared("rocm", amd), [64, 64, 64, 160, 64, 64]);
        assert_eq!(caps("cuda:sm_90a").matrix, MatrixUnit::Wgmma);
        assert_eq!(caps("cuda:sm_90").matrix, MatrixUnit::Mma);
        assert_eq!(caps("cuda:sm_100a").matrix, MatrixUnit::Mma);
        assert_eq!(
            [caps("rocm:gfx942").wave, caps("rocm:gfx1100").wave],
            [64, 32]
        );
        let holds = |name: &str| {
            let unit = caps(name).unit.unwrap();
            [unit.threads, unit.blocks, unit.shared >> 10]
        };
        assert_eq!(holds("cuda:sm_87"), [1536, 16, 164]);
        assert_eq!(holds("cuda:sm_88"), [1536, 16, 100]);
        assert_eq!(holds("cuda:sm_100"), [2048, 32, 228]);
        assert_eq!(holds("cuda:sm_110"), [1536, 24, 228]);
        assert_eq!(holds("cuda:sm_121a"), [1536, 24, 100]);
        assert!("cpu:avx2".parse::<Target>().unwrap().caps().is_none());
    }
}
