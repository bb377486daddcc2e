//! The simulated GPU as a [`Device`].

use crate::block::ThreadOrder;
use crate::memory::Memory;
use crate::module::FiberModule;
use crate::stamp::MOST_LAUNCHES;
use crate::switch::HERE;
use crate::worker::{Counts, Worker};
use moesaic_cpu::CpuDevice;
use moesaic_kernel::{Entry, RocmArch, SimArch, Target};
use moesaic_target::{
    Artifact, Buffer, Device, DeviceError, DeviceInfo, KernelCounters, Module, SharedError,
    UnavailableReason,
};
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

/// A CPU on which no fiber runs.
#[derive(Debug, thiserror::Error)]
#[error("fibers are written for x86-64 and aarch64")]
struct NoFibers;

/// Options of a [`FiberDevice`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FiberOptions {
    /// Cores that run blocks, at most 16; `None` takes all of them. Results do
    /// not depend on the number.
    pub threads: Option<NonZeroUsize>,
    /// The orders of threads that each launch runs under. The first gives the
    /// result; the launch fails if the result differs under another.
    pub orders: Vec<ThreadOrder>,
}

impl Default for FiberOptions {
    /// Takes all cores, and runs threads in turn and once more in random order.
    fn default() -> FiberOptions {
        FiberOptions {
            threads: None,
            orders: vec![ThreadOrder::Ascending, ThreadOrder::Random(1)],
        }
    }
}

/// Largest number of workers. Every stack has a guard page, and a system has a
/// limited number of mappings.
const MOST_CORES: usize = 16;

/// A simulated AMD GPU: every thread of a block is a fiber on this CPU.
///
/// The device watches every access of memory. A launch fails with a
/// [`DeviceError::Launch`] if an access is outside of a tensor, reads unwritten
/// bytes, is misaligned, writes a read-only parameter, or is out of order with
/// an access of another thread or block. The error names block, thread, tensor,
/// element and the line of the text. Deadlocks and lanes of a wave at different
/// collectives fail in the same way. Launches are synchronous.
pub struct FiberDevice {
    info: DeviceInfo,
    shared: Arc<DeviceState>,
}

/// The state that modules share with their device.
pub(crate) struct DeviceState {
    pub(crate) arch: RocmArch,
    pub(crate) cores: usize,
    pub(crate) orders: Vec<ThreadOrder>,
    pub(crate) memory: Arc<Memory>,
    /// Held while a launch runs.
    pub(crate) turn: Mutex<()>,
    launches: Mutex<u32>,
    idle: Mutex<Vec<Worker>>,
    counters: Mutex<Vec<KernelCounters>>,
}

impl FiberDevice {
    /// Returns the GPU of this architecture.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] on CPUs that fibers are not written for.
    pub fn new(arch: RocmArch, options: FiberOptions) -> Result<FiberDevice, DeviceError> {
        if !HERE {
            let reason = UnavailableReason::Simulator(SharedError::new(NoFibers));
            let backend = "sim".to_string();
            return Err(DeviceError::Unavailable { backend, reason });
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let cores = options
            .threads
            .map_or(cores, NonZeroUsize::get)
            .min(MOST_CORES);
        let host = CpuDevice::new();
        let info = DeviceInfo {
            name: format!("{} as fibers on {}", arch.name, host.info().name),
            target: Target::Sim(SimArch::Rocm(arch)),
            units: cores as u32,
            memory_bytes: host.info().memory_bytes,
        };
        let shared = Arc::new(DeviceState {
            arch,
            cores,
            orders: options.orders,
            memory: Arc::default(),
            turn: Mutex::default(),
            launches: Mutex::default(),
            idle: Mutex::default(),
            counters: Mutex::default(),
        });
        Ok(FiberDevice { info, shared })
    }
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

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device for FiberDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn load(&self, artifact: &Artifact, entries: &[Entry]) -> Result<Arc<dyn Module>, DeviceError> {
        let module = FiberModule::load(artifact, entries, Arc::clone(&self.shared))?;
        Ok(Arc::new(module))
    }

    fn free_bytes(&self) -> Option<u64> {
        CpuDevice::new().free_bytes()
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        let (ptr, owner) = self.shared.memory.alloc(bytes)?;
        Ok(Buffer::new(ptr, bytes, Box::new(owner)))
    }

    fn upload(&self, bytes: &[u8], buffer: &Buffer, offset: usize) -> Result<(), DeviceError> {
        let to = buffer.range("upload", offset, bytes.len())?;
        let _turn = lock(&self.shared.turn);
        // SAFETY: the range lies in the buffer, which its owner keeps; no
        // launch runs.
        unsafe { std::ptr::copy(bytes.as_ptr(), to.0 as *mut u8, bytes.len()) };
        if let Some(allocation) = self.shared.memory.find(to.0 as usize) {
            allocation.mark_written(to.0 as usize - allocation.start(), bytes.len());
        }
        Ok(())
    }

    fn download(
        &self,
        buffer: &Buffer,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        let from = buffer.range("download", offset, bytes.len())?;
        let _turn = lock(&self.shared.turn);
        // SAFETY: as in `upload`.
        unsafe { std::ptr::copy(from.0 as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Returns launches, blocks, collectives, barriers, matrix products and
    /// bytes of global memory; counters that a fiber cannot know stay 0.
    fn take_counters(&self) -> Vec<KernelCounters> {
        std::mem::take(&mut lock(&self.shared.counters))
    }
}
