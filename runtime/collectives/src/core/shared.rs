//! The lock around a rank's core.

use super::Core;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A core that a rank and its [`ProgressThread`](crate::ProgressThread) use in turns. Only the
/// thread that holds the lock calls the transport, because MPI allows one thread at a time.
pub(crate) struct Shared {
    core: Mutex<Core>,
    /// The number of callers that wait for the lock; the progress thread yields to them.
    wanted: AtomicUsize,
}

impl Shared {
    pub fn new(core: Core) -> Shared {
        Shared {
            core: Mutex::new(core),
            wanted: AtomicUsize::new(0),
        }
    }

    /// Locks the core. A poisoned lock is still usable: the thread that panicked has ended the
    /// core, which reports that itself.
    pub fn lock(&self) -> MutexGuard<'_, Core> {
        self.wanted.fetch_add(1, Ordering::Relaxed);
        let core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        self.wanted.fetch_sub(1, Ordering::Relaxed);
        core
    }

    /// Locks the core unless a caller wants it.
    pub fn lock_unless_wanted(&self) -> Option<MutexGuard<'_, Core>> {
        if self.wanted.load(Ordering::Relaxed) > 0 {
            return None;
        }
        Some(self.core.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
