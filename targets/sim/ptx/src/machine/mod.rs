//! The machine: runs the blocks of a kernel, a warp at a time.

mod access;
mod atomics;
mod barriers;
mod bulk;
mod clash;
mod clock;
mod clocks;
mod collective;
mod copies;
mod engines;
mod global;
pub mod lanes;
mod matrix;
mod mbarriers;
mod products;
mod run;
mod schedule;
mod shadow;
mod shared;
mod state;
mod tally;
mod warp;

use crate::code::Kernel;
use crate::code::layout::SHARED_START;
use crate::finding::{Fault, FaultPlace, FindingKind};
use crate::memory::{BlockLog, LaunchLog, Regions};
use clock::Known;
use lanes::Execute;
use shadow::Shadow;
use state::barriers::{ClusterState, NamedBarrier};
use state::bulk::Bulks;
use state::copies::Copies;
use state::global::GlobalShadow;
use state::products::WarpGroup;
use state::sync::Sync;
use std::collections::HashMap;
use std::rc::Rc;
pub use tally::Tally;
use warp::{SpecialRegisters, Warp};

/// The part of a launch that is the same for every block.
pub struct LaunchContext<'a> {
    pub kernel: &'a Kernel,
    pub params: &'a [u8],
    pub regions: &'a Regions,
    pub log: &'a LaunchLog,
    pub grid: [u32; 3],
    pub threads: u32,
    /// Blocks per cluster, adjacent in x.
    pub cluster: u32,
    /// Dynamic shared memory of the launch, in bytes.
    pub shared_bytes: u32,
    pub seed: u64,
    /// Blocks run one after the other, and each sees the writes of those
    /// before.
    pub in_order: bool,
    /// Earlier launches may still be running.
    pub dependent: bool,
    /// Every check runs.
    pub full: bool,
}

/// The state of a block.
#[derive(Default)]
pub struct BlockState {
    pub place: SpecialRegisters,
    /// Shared memory; the index is the address.
    pub shared: Vec<u8>,
    pub shadow: Shadow,
    pub barriers: Vec<NamedBarrier>,
    /// Registers that warps have given back by setmaxnreg, counted for a thread of each.
    pub spare_registers: u32,
    /// Warps of the block: a range of the machine's list.
    pub warps: std::ops::Range<usize>,
}

impl BlockState {
    fn has_registers(&self, count: u32) -> bool {
        self.spare_registers >= count
    }

    fn reset(
        &mut self,
        place: SpecialRegisters,
        end: usize,
        warps: std::ops::Range<usize>,
        all: usize,
        full: bool,
    ) {
        self.place = place;
        self.shared.clear();
        // Bytes of 0xff are NaN in every float type, so that an unwritten
        // operand shows in the result even where checks are basic.
        self.shared.resize(end, 0xff);
        self.barriers.clear();
        self.barriers.resize_with(16, NamedBarrier::default);
        self.spare_registers = 0;
        self.warps = warps;
        if full {
            self.shadow.reset(end, all);
        }
    }
}

/// Runs the clusters of a launch, one after the other.
pub struct ClusterRunner<'a> {
    launch: &'a LaunchContext<'a>,
    kernel: &'a Kernel,
    execute: Execute,
    warps: Vec<Warp>,
    blocks: Vec<BlockState>,
    copies: Vec<Copies>,
    cluster_barrier: ClusterState,
    sync: Sync,
    bulk: Bulks,
    products: Vec<WarpGroup>,
    /// Shared-memory chunks that products read, by instruction and descriptors.
    chunks: HashMap<(u32, u64, u64), Rc<[u32]>>,
    log: BlockLog,
    global: GlobalShadow,
    /// Region of the last access.
    hint: usize,
    /// Lanes of the running warp that must not touch global memory yet.
    early: u32,
    random: Random,
    /// Executions of each instruction.
    pub executed: Vec<u64>,
    pub tally: Tally,
    /// Number of events so far that other threads may wait for.
    changes: u64,
    /// Block number of the cluster's first block.
    first_block: u64,
    /// The instruction that findings name.
    pc: u32,
    clock: u64,
    /// Current time, which advances whenever a thread releases its writes.
    time: u32,
}

/// A small random generator: the same seed gives the same delays.
pub struct Random(u64);

impl Random {
    /// Returns a number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end.max(1)
    }
}

/// A defect with its block, threads and instruction.
#[derive(Debug)]
pub struct BlockFailure {
    pub kind: FindingKind,
    pub block: [u32; 3],
    pub threads: Vec<u32>,
    pub pc: u32,
    /// Instruction of the other access.
    pub other: Option<u32>,
    pub message: String,
}

impl<'a> ClusterRunner<'a> {
    pub fn new(launch: &'a LaunchContext<'a>) -> ClusterRunner<'a> {
        let warps = launch.threads.div_ceil(32) * launch.cluster;
        ClusterRunner {
            launch,
            kernel: launch.kernel,
            execute: lanes::pick(),
            warps: (0..warps).map(|_| Warp::default()).collect(),
            blocks: Vec::new(),
            copies: (0..warps).map(|_| Copies::default()).collect(),
            cluster_barrier: ClusterState::default(),
            sync: Sync::default(),
            bulk: Bulks::default(),
            products: Vec::new(),
            chunks: HashMap::new(),
            log: BlockLog::default(),
            global: GlobalShadow::default(),
            hint: 0,
            early: 0,
            random: Random(1),
            executed: vec![0; launch.kernel.code.len()],
            tally: Tally::default(),
            changes: 0,
            first_block: 0,
            pc: 0,
            clock: 0,
            time: 1,
        }
    }

    /// Runs cluster `number` to its end.
    pub fn run(&mut self, number: u64) -> Result<(), BlockFailure> {
        self.start(number);
        let result = self.schedule();
        // One log serves all blocks of a cluster: they know each other's order
        // by clocks.
        let visible = self.launch.in_order.then_some(self.launch.regions);
        self.launch
            .log
            .merge(self.first_block, &mut self.log, visible);
        result.map_err(|(warp, fault)| self.failure(warp, *fault))
    }

    fn start(&mut self, number: u64) {
        let launch = self.launch;
        let cluster = launch.cluster;
        self.first_block = number * u64::from(cluster);
        // Each cluster gets a stream of its own, derived from its number:
        // results may not depend on the host thread that runs it. Bit 0 is set
        // because zero is a fixed point of xorshift.
        self.random =
            Random((launch.seed ^ self.first_block.wrapping_mul(0x9e37_79b9_7f4a_7c15)) | 1);
        self.begin_clocks();
        self.global.begin();
        let known = Known::start(self.warps.len(), self.time);
        // The start stamp must be older than any access: memory that the launch
        // found counts as known to every thread, and later stamps do not.
        self.time += 1;
        let per_block = launch.threads.div_ceil(32);
        let end = self.kernel.dynamic_shared + launch.shared_bytes;
        self.blocks
            .resize_with(cluster as usize, BlockState::default);
        for rank in 0..cluster {
            let place = SpecialRegisters {
                block: block_index(launch.grid, self.first_block + u64::from(rank)),
                grid: launch.grid,
                threads: launch.threads,
                rank,
                cluster,
                shared_bytes: end - SHARED_START,
                dynamic_bytes: launch.shared_bytes,
            };
            for warp in 0..per_block {
                let number = rank * per_block + warp;
                let own = &mut self.warps[number as usize];
                own.reset(self.kernel, number, warp * 32, &place, &known);
                own.early = if launch.dependent { own.lanes } else { 0 };
                self.copies[number as usize].reset();
            }
            let first = (rank * per_block) as usize;
            let warps = first..first + per_block as usize;
            let all = self.warps.len();
            self.blocks[rank as usize].reset(place, end as usize, warps, all, launch.full);
        }
        self.bulk = Bulks::default();
        self.products.clear();
        self.products
            .resize_with(self.warps.len().div_ceil(4), WarpGroup::default);
        self.cluster_barrier = ClusterState::default();
    }

    /// Adds the place to a fault.
    fn failure(&self, warp: usize, fault: Fault) -> BlockFailure {
        let own = &self.warps[warp];
        let place = fault.at.unwrap_or_else(|| FaultPlace {
            pc: self.pc,
            block: own.block,
            threads: own.threads(fault.lanes),
        });
        BlockFailure {
            kind: fault.kind,
            block: self.blocks[place.block as usize].place.block,
            threads: place.threads,
            pc: place.pc,
            other: fault.other,
            message: fault.message,
        }
    }
}

/// Returns the x, y, z of a block number.
pub fn block_index(grid: [u32; 3], number: u64) -> [u32; 3] {
    let (x, y) = (u64::from(grid[0]), u64::from(grid[1]));
    [
        (number % x) as u32,
        (number / x % y) as u32,
        (number / (x * y)) as u32,
    ]
}

impl Warp {
    /// Returns the threads of these lanes.
    pub fn threads(&self, lanes: u32) -> Vec<u32> {
        (0..32)
            .filter(|lane| lanes >> lane & 1 == 1)
            .map(|lane| self.first_thread + lane)
            .collect()
    }
}
