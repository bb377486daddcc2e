//! A core between the threads that use it.

use super::Core;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A core that a rank and its [`ProgressThread`](crate::ProgressThread) take turns with. Every call of an
/// transport is made by whoever has it locked.
pub(crate) struct Shared {
    core: Mutex<Core>,
    /// Callers that want it, before whom the progress thread stands back.
    wanted: AtomicUsize,
}

impl Shared {
    pub fn new(core: Core) -> Shared {
        Shared {
            core: Mutex::new(core),
            wanted: AtomicUsize::new(0),
        }
    }

    /// Waits for it. A panic in between has ended the core, which says so itself.
    pub fn lock(&self) -> MutexGuard<'_, Core> {
        self.wanted.fetch_add(1, Ordering::Relaxed);
        let core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        self.wanted.fetch_sub(1, Ordering::Relaxed);
        core
    }

    /// The same where nobody else wants it.
    pub fn lock_unless_wanted(&self) -> Option<MutexGuard<'_, Core>> {
        if self.wanted.load(Ordering::Relaxed) > 0 {
            return None;
        }
        Some(self.core.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
