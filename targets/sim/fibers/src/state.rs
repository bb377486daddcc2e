//! The state that modules share with their device.

use crate::block::ThreadOrder;
use crate::memory::Memory;
use crate::stamp::MOST_LAUNCHES;
use crate::worker::{Counts, Worker};
use moesaic_kernel::RocmArch;
use moesaic_target::KernelCounters;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The state that modules share with their device.
pub(crate) struct DeviceState {
    pub(crate) arch: RocmArch,
    pub(crate) cores: usize,
    pub(crate) orders: Vec<ThreadOrder>,
    pub(crate) memory: Arc<Memory>,
    /// Held while a launch runs.
    pub(crate) turn: Mutex<()>,
    pub(crate) launches: Mutex<u32>,
    pub(crate) idle: Mutex<Vec<Worker>>,
    pub(crate) counters: Mutex<Vec<KernelCounters>>,
}

impl DeviceState {
    /// Returns the shared memory that a block may take, in bytes.
    pub(crate) fn shared_bytes(&self) -> u32 {
        self.arch.caps().block_shared
    }

    /// Returns the number of a launch, for stamps. When the numbers start
    /// again, the device first forgets the accesses of earlier launches.
    pub(crate) fn next_launch(&self) -> u32 {
        let mut launches = lock(&self.launches);
        if *launches >= MOST_LAUNCHES {
            self.memory.forget();
            *launches = 0;
        }
        *launches += 1;
        *launches
    }

    pub(crate) fn worker(&self) -> std::io::Result<Worker> {
        let idle = lock(&self.idle).pop();
        idle.map_or_else(|| Worker::new(self.arch), Ok)
    }

    pub(crate) fn give_back(&self, worker: Worker) {
        lock(&self.idle).push(worker);
    }

    /// Adds the counts of a launch of this kernel.
    pub(crate) fn count(&self, symbol: &str, counts: &Counts) {
        let mut list = lock(&self.counters);
        let at = list.iter().position(|c| c.symbol == symbol);
        let at = at.unwrap_or_else(|| {
            let symbol = symbol.to_string();
            list.push(KernelCounters {
                symbol,
                ..KernelCounters::default()
            });
            list.len() - 1
        });
        let kernel = &mut list[at];
        kernel.launches += 1;
        kernel.blocks += counts.blocks;
        kernel.instructions.warp += counts.collectives;
        kernel.instructions.sync += counts.block_barriers;
        kernel.instructions.tensor += counts.products;
        kernel.tensor_multiply_adds += counts.multiply_adds;
        kernel.global_loads.bytes += counts.global_read_bytes;
        kernel.global_stores.bytes += counts.global_written_bytes;
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
