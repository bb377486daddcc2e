//! The machine that a tiling is for.

use crate::CacheClass;
use moesaic_kernel::{ArchCaps, CpuIsa, CudaArch, Entry, RocmArch, SimArch, Target};

/// The machine that a kernel is tiled for.
#[derive(Clone, Copy, Debug)]
pub enum TileMachine {
    /// A CPU. A block is one call of the block function; threads are the
    /// runtime's, so every kernel has one thread per block.
    Cpu(Core),
    /// A GPU. Routing and data movement are tiled alike for all of them but for
    /// the width of a warp.
    Gpu(Gpu),
}

/// The properties of a CPU that tilings depend on. The size of a cache changes no order of sums: it
/// cuts work into blocks, or the depth into slices between which sums are kept unchanged.
#[derive(Clone, Copy, Debug)]
pub struct Core {
    /// Its instructions.
    pub isa: CpuIsa,
    /// Its caches.
    pub caches: CacheClass,
}

/// The architecture of a GPU, on which tilings depend.
#[derive(Clone, Copy, Debug)]
pub enum Gpu {
    /// NVIDIA's.
    Cuda(CudaArch),
    /// AMD's.
    Rocm(RocmArch),
}

impl TileMachine {
    /// Returns the machine that runs the kernels of a target; `caches` are those of a CPU.
    pub fn of(target: Target, caches: CacheClass) -> TileMachine {
        match target {
            // A simulator runs the text of its hardware to the byte, so it gets the same tiles.
            Target::Cpu(isa) | Target::Sim(SimArch::Cpu(isa)) => {
                TileMachine::Cpu(Core { isa, caches })
            }
            Target::Cuda(arch) | Target::Sim(SimArch::Cuda(arch)) => {
                TileMachine::Gpu(Gpu::Cuda(arch))
            }
            Target::Rocm(arch) | Target::Sim(SimArch::Rocm(arch)) => {
                TileMachine::Gpu(Gpu::Rocm(arch))
            }
        }
    }

    /// Returns an entry that begins by waiting for the launch before it, on GPUs whose launches may
    /// overlap.
    pub(crate) fn overlapping(self, mut entry: Entry) -> Entry {
        // A kernel's blocks may start before the one before it has ended, which hides the start of
        // a launch behind the end of another.
        let wait = matches!(self, TileMachine::Gpu(gpu) if gpu.caps().dependent_launches);
        entry.launch.dependent = wait;
        entry
    }
}

impl Gpu {
    /// Returns the properties of the architecture.
    pub fn caps(self) -> &'static ArchCaps {
        match self {
            Gpu::Cuda(arch) => arch.caps(),
            Gpu::Rocm(arch) => arch.caps(),
        }
    }

    /// Returns the lanes of a warp.
    pub fn wave(self) -> u32 {
        self.caps().wave
    }
}
