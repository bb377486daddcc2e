//! Blocks that one unit of a GPU holds at once, and the waves in which a grid runs.

use moesaic::Target;
use moesaic::kernel::UnitCaps;

/// The resources of one streaming multiprocessor or compute unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit {
    caps: UnitCaps,
    /// The most bytes of shared memory of one block.
    pub block_shared: u32,
    /// The threads that are given registers together.
    warp: u32,
}

/// The needs of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockNeeds {
    pub threads: u32,
    /// The registers of a thread.
    pub registers: u32,
    pub shared: u32,
}

impl Unit {
    /// Returns the unit of a GPU; `None` where a few numbers do not describe it.
    pub fn of(target: Target) -> Option<Unit> {
        let caps = target.caps()?;
        Some(Unit {
            caps: caps.unit?,
            block_shared: caps.block_shared,
            warp: caps.wave,
        })
    }

    /// Returns the blocks that the unit holds at once.
    pub fn resident(&self, block: BlockNeeds) -> u32 {
        let warps = block.threads.div_ceil(self.warp).max(1);
        let registers = warps * (block.registers * self.warp).next_multiple_of(self.caps.granule);
        let shared = block.shared + self.caps.reserved;
        let by_threads = self.caps.threads / (warps * self.warp);
        let by_registers = self
            .caps
            .registers
            .checked_div(registers)
            .unwrap_or(u32::MAX);
        let by_shared = self.caps.shared.checked_div(shared).unwrap_or(u32::MAX);
        let all = [self.caps.blocks, by_threads, by_registers, by_shared];
        all.into_iter().min().unwrap_or(0)
    }

    /// Returns the share of the unit's threads that blocks of this kind fill.
    pub fn occupancy(&self, block: BlockNeeds) -> f64 {
        let warps = block.threads.div_ceil(self.warp).max(1);
        f64::from(self.resident(block) * warps * self.warp) / f64::from(self.caps.threads)
    }
}

/// The waves in which a grid runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Waves {
    /// The waves, the last one included.
    pub number: u64,
    /// The part of the last wave that has blocks.
    pub tail: f64,
}

impl Waves {
    /// Divides a grid over places that each hold one block; `None` without blocks or places.
    pub fn new(blocks: u64, places: u64) -> Option<Waves> {
        if blocks == 0 || places == 0 {
            return None;
        }
        let last = (blocks - 1) % places + 1;
        Some(Waves {
            number: blocks.div_ceil(places),
            tail: last as f64 / places as f64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resident(target: &str, threads: u32, registers: u32, shared: u32) -> u32 {
        let unit = Unit::of(target.parse().unwrap()).unwrap();
        unit.resident(BlockNeeds {
            threads,
            registers,
            shared,
        })
    }

    #[test]
    fn the_scarcest_resource_limits_blocks() {
        assert_eq!(resident("cuda:sm_90a", 128, 32, 0), 16); // threads
        assert_eq!(resident("cuda:sm_90a", 128, 168, 0), 3); // registers
        assert_eq!(resident("sim:sm_90a", 384, 168, 220 << 10), 1); // shared memory
        assert_eq!(resident("cuda:sm_80", 32, 16, 0), 32); // blocks
        assert_eq!(resident("cuda:sm_80", 128, 32, 82 << 10), 1); // with what the system takes
        assert_eq!(resident("rocm:gfx942", 256, 128, 32 << 10), 2);
        assert_eq!(resident("cuda:sm_75", 2048, 32, 0), 0);
        assert!(Unit::of("rocm:gfx1100".parse().unwrap()).is_none());
        assert!(Unit::of("cpu:avx2".parse().unwrap()).is_none());
    }

    #[test]
    fn the_last_wave_is_the_tail() {
        let waves = |blocks, places| Waves::new(blocks, places).map(|w| (w.number, w.tail));
        assert_eq!(waves(132, 132), Some((1, 1.0)));
        assert_eq!(waves(133, 132), Some((2, 1.0 / 132.0)));
        assert_eq!(waves(0, 132), None);
        assert_eq!(waves(5, 0), None);
    }
}
