//! Blocks that one unit of a GPU holds at once, and the waves in which a grid runs.

use moesaic::Target;

/// The resources of one streaming multiprocessor or compute unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit {
    /// The threads that it holds.
    pub threads: u32,
    /// The blocks that it holds.
    pub blocks: u32,
    /// The registers that it holds, of 32 bits.
    pub registers: u32,
    /// The bytes of shared memory that all its blocks have together.
    pub shared: u32,
    /// The most bytes of shared memory of one block.
    pub block_shared: u32,
    /// The bytes that the system takes of each block.
    reserved: u32,
    /// The threads that are given registers together, and the unit of their registers.
    warp: u32,
    granule: u32,
}

/// The needs of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub threads: u32,
    /// The registers of a thread.
    pub registers: u32,
    pub shared: u32,
}

impl Unit {
    /// Returns the unit of a GPU: NVIDIA's tables of compute capabilities, AMD's CDNA manuals.
    /// RDNA has two units in a work-group processor, which these few numbers do not describe.
    pub fn of(target: Target) -> Option<Unit> {
        let arch = target.hardware().arch();
        let digits = arch.trim_end_matches(|c: char| !c.is_ascii_digit());
        let (threads, blocks, shared, block_shared) = match digits {
            "sm_70" => (2048, 32, 96, 96),
            "sm_75" => (1024, 16, 64, 64),
            "sm_80" => (2048, 32, 164, 163),
            "sm_86" => (1536, 16, 100, 99),
            "sm_89" => (1536, 24, 100, 99),
            "sm_90" | "sm_100" | "sm_103" => (2048, 32, 228, 227),
            "sm_120" => (1536, 24, 100, 99),
            _ => return Unit::of_cdna(&arch),
        };
        let old = ["sm_70", "sm_75"].contains(&digits);
        Some(Unit {
            threads,
            blocks,
            registers: 65536,
            shared: shared << 10,
            block_shared: block_shared << 10,
            reserved: if old { 0 } else { 1 << 10 },
            warp: 32,
            granule: 256,
        })
    }

    fn of_cdna(arch: &str) -> Option<Unit> {
        let (waves, registers, shared) = match arch {
            "gfx908" => (40, 4 * 64 * 256, 64),
            "gfx90a" | "gfx942" => (32, 4 * 64 * 512, 64),
            "gfx950" => (32, 4 * 64 * 512, 160),
            _ => return None,
        };
        Some(Unit {
            threads: waves * 64,
            blocks: waves,
            registers,
            shared: shared << 10,
            block_shared: shared << 10,
            reserved: 0,
            warp: 64,
            granule: 64 * 8,
        })
    }

    /// Returns the blocks that the unit holds at once.
    pub fn resident(&self, block: Block) -> u32 {
        let warps = block.threads.div_ceil(self.warp).max(1);
        let registers = warps * (block.registers * self.warp).next_multiple_of(self.granule);
        let shared = block.shared + self.reserved;
        let by_threads = self.threads / (warps * self.warp);
        let by_registers = self.registers.checked_div(registers).unwrap_or(u32::MAX);
        let by_shared = self.shared.checked_div(shared).unwrap_or(u32::MAX);
        let all = [self.blocks, by_threads, by_registers, by_shared];
        all.into_iter().min().unwrap_or(0)
    }

    /// Returns the share of the unit's threads that blocks of this kind fill.
    pub fn occupancy(&self, block: Block) -> f64 {
        let warps = block.threads.div_ceil(self.warp).max(1);
        f64::from(self.resident(block) * warps * self.warp) / f64::from(self.threads)
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
        unit.resident(Block {
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
