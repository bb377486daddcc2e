//! What tilings follow.

use crate::CacheClass;
use moesaic_kernel::{CpuIsa, CudaArch, RocmArch, SimArch, Target};

/// What a kernel is tiled for.
#[derive(Clone, Copy, Debug)]
pub enum Machine {
    /// A CPU. A block is one call of the block function; threads are the
    /// runtime's, so every kernel has one thread per block.
    Cpu(Core),
    /// An NVIDIA GPU.
    Cuda(CudaArch),
    /// An AMD GPU.
    Rocm(RocmArch),
}

/// What tilings of a CPU follow. No size of a cache changes an order of sums: it
/// cuts work into blocks, or the depth into slices between which sums are kept as
/// they are.
#[derive(Clone, Copy, Debug)]
pub struct Core {
    /// Its instructions.
    pub isa: CpuIsa,
    /// Its caches.
    pub caches: CacheClass,
}

impl Machine {
    /// What a target's kernels run on, of which `caches` are those of a CPU.
    pub fn of(target: Target, caches: CacheClass) -> Machine {
        match target {
            Target::Cpu(isa) | Target::Sim(SimArch::Cpu(isa)) => Machine::Cpu(Core { isa, caches }),
            Target::Cuda(arch) | Target::Sim(SimArch::Cuda(arch)) => Machine::Cuda(arch),
            Target::Rocm(arch) | Target::Sim(SimArch::Rocm(arch)) => Machine::Rocm(arch),
        }
    }

    /// Lanes of a warp; `None` on a CPU. Routing and data movement are tiled alike
    /// for all GPUs but for these.
    pub fn wave(self) -> Option<u32> {
        match self {
            Machine::Cpu(_) => None,
            Machine::Cuda(_) => Some(32),
            Machine::Rocm(arch) => Some(arch.wave),
        }
    }
}
