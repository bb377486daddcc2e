//! The simulated GPU as a [`Device`].

use crate::block::ThreadOrder;
use crate::module::FiberModule;
use crate::state::{DeviceState, lock};
use crate::switch::HERE;
use moesaic_cpu::CpuDevice;
use moesaic_kernel::{Entry, RocmArch, SimArch, Target};
use moesaic_target::{
    Artifact, Buffer, Device, DeviceError, DeviceInfo, KernelCounters, Module, SharedError,
    UnavailableReason,
};
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};

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

#[doc(hidden)]
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
