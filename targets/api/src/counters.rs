//! Counters of a simulator.

use serde::{Deserialize, Serialize};

/// Sums over the launches of one kernel in a simulator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelCounters {
    /// The entry's symbol.
    pub symbol: String,
    /// Launches that ran.
    pub launches: u64,
    /// Blocks of those launches.
    pub blocks: u64,
    /// Instructions of whole warps, by class.
    pub instructions: InstructionCounts,
    /// Loads of warps from global memory.
    pub global_loads: GlobalCounts,
    /// Stores and atomics of warps to global memory.
    pub global_stores: GlobalCounts,
    /// Global memory requests by bytes per thread: 1, 2, 4, 8, 16.
    pub global_widths: [u64; 5],
    /// Requests of warps to shared memory.
    pub shared: SharedCounts,
    /// Multiply-adds of the tensor cores.
    pub tensor_multiply_adds: u64,
    /// Bytes that TMA copied from global to shared memory.
    pub async_load_bytes: u64,
    /// Bytes that TMA copied from shared to global memory.
    pub async_store_bytes: u64,
}

/// Executed warp instructions by class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstructionCounts {
    /// Integer arithmetic, logic, comparisons and selections.
    pub integer: u64,
    /// Floating point arithmetic.
    pub float: u64,
    /// Conversions of numbers and addresses.
    pub convert: u64,
    /// Moves between registers.
    pub moves: u64,
    /// Loads, stores, atomics, ldmatrix.
    pub memory: u64,
    /// Branches and exits.
    pub control: u64,
    /// Shuffles, votes, matches, reductions over a warp.
    pub warp: u64,
    /// mma and wgmma.
    pub tensor: u64,
    /// Barriers and fences.
    pub sync: u64,
    /// Asynchronous copies and their groups.
    pub asynchronous: u64,
}

/// Traffic with global memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GlobalCounts {
    /// Memory instructions of warps.
    pub requests: u64,
    /// Sectors of 32 bytes that the requests touched.
    pub sectors: u64,
    /// Bytes that the threads requested.
    pub bytes: u64,
}

/// Traffic with shared memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedCounts {
    /// Memory instructions of warps.
    pub requests: u64,
    /// Passes over the banks, including conflicts.
    pub wavefronts: u64,
    /// Passes without bank conflicts.
    pub ideal_wavefronts: u64,
}

impl KernelCounters {
    /// Returns the sum of all warp instructions.
    pub fn warp_instructions(&self) -> u64 {
        let i = &self.instructions;
        i.integer
            + i.float
            + i.convert
            + i.moves
            + i.memory
            + i.control
            + i.warp
            + i.tensor
            + i.sync
            + i.asynchronous
    }
}

impl GlobalCounts {
    /// Returns the sectors per request: 4 for a coalesced access of 4 bytes per thread.
    pub fn sectors_per_request(&self) -> f64 {
        self.sectors as f64 / self.requests.max(1) as f64
    }
}

impl SharedCounts {
    /// Returns the passes that bank conflicts added.
    pub fn bank_conflicts(&self) -> u64 {
        self.wavefronts.saturating_sub(self.ideal_wavefronts)
    }
}
