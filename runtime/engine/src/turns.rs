//! The locks by which the calls of layers take turns.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The locks of a layer's calls. Layers that share memory share them.
#[derive(Default)]
pub(crate) struct Turns {
    /// Held by a call, because two calls cannot use one workspace.
    calls: Mutex<()>,
    /// Read by a call, and written while a weight is replaced. The handles of a layer have it in
    /// common: their calls run at the same time, but none runs while a weight changes.
    weights: Arc<RwLock<()>>,
}

/// The turn of one call.
pub(crate) struct CallTurn<'a> {
    _call: MutexGuard<'a, ()>,
    _weights: RwLockReadGuard<'a, ()>,
}

impl Turns {
    /// Returns the locks of a handle, whose calls wait for no other handle's.
    pub fn handle(&self) -> Turns {
        Turns {
            calls: Mutex::default(),
            weights: Arc::clone(&self.weights),
        }
    }

    /// Waits for the calls that use the same workspace, and for a change of weights.
    pub fn call(&self) -> CallTurn<'_> {
        CallTurn {
            _call: lock(&self.calls),
            _weights: self.weights.read().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Waits for the calls of all handles, and keeps others out.
    pub fn change_weights(&self) -> RwLockWriteGuard<'_, ()> {
        self.weights.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Locks a mutex even after a panic: it guards memory that the next call overwrites.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
