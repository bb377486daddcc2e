//! The state that a device and its modules share.

use crate::code::Kernel;
use crate::finding::Finding;
use crate::memory::Heap;
use crate::text::Locations;
use moesaic_kernel::Entry;
use moesaic_target::{KernelCounters, KernelReport};
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard};

/// Options of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PtxOptions {
    /// Seed of the delays of asynchronous copies and products, and of the order
    /// of warps. A correct kernel gives the same results for every seed.
    pub seed: u64,
    /// Host threads; `None` takes as many as the host has. Results do not
    /// depend on the number.
    pub threads: Option<NonZeroUsize>,
    /// The set of checks.
    pub checks: CheckSet,
}

/// The set of checks that run. Bounds, alignment, masks, barriers and deadlocks
/// are always checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckSet {
    /// No further checks: the fastest.
    Basic,
    /// Races, uninitialised reads and proxy fences as well.
    Full,
}

impl Default for PtxOptions {
    fn default() -> PtxOptions {
        PtxOptions {
            seed: 1,
            threads: None,
            checks: CheckSet::Full,
        }
    }
}

/// The state that a device and its modules share.
pub struct DeviceState {
    pub options: PtxOptions,
    pub threads: usize,
    /// DeviceState memory that a block can have, in bytes.
    pub shared_limit: u32,
    pub heap: Mutex<Heap>,
    pub findings: Mutex<Vec<Finding>>,
    pub counters: Mutex<Vec<KernelCounters>>,
}

/// A kernel of a module.
pub struct ModuleKernel {
    pub kernel: Kernel,
    pub entry: Option<Entry>,
    pub source: Arc<[String]>,
    pub locations: Arc<Locations>,
}

impl ModuleKernel {
    /// Returns the signature that the PTX declares.
    pub fn report(&self) -> KernelReport {
        let params = self
            .kernel
            .params
            .iter()
            .map(|param| moesaic_target::ParamSlot {
                offset: param.offset,
                size: param.bytes,
            });
        KernelReport {
            symbol: self.kernel.name.clone(),
            max_threads: self.kernel.max_threads,
            params: params.collect(),
            ..KernelReport::default()
        }
    }
}

/// Locks a mutex, even after a thread panicked while holding it.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}
