//! The compiles in progress in this process.

use crate::{KernelKey, StoredKernel};
use moesaic_target::CompileError;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) type Outcome = Result<Arc<StoredKernel>, Arc<CompileError>>;

/// One compile in progress. The first thread to lock it compiles; the others find its outcome.
pub(crate) type Flight = Arc<Mutex<Option<Outcome>>>;

/// The compiles in progress in this process.
#[derive(Default)]
pub(crate) struct Flights(Mutex<HashMap<KernelKey, Flight>>);

impl Flights {
    pub fn join(&self, key: KernelKey) -> Flight {
        Arc::clone(self.lock().entry(key).or_default())
    }

    pub fn leave(&self, key: &KernelKey) {
        self.lock().remove(key);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<KernelKey, Flight>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Flights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Flights({})", self.lock().len())
    }
}
