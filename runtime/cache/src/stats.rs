//! Counters of a store.

use std::sync::atomic::{AtomicU64, Ordering};

/// The activity of a store since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Kernels found in the store.
    pub hits: u64,
    /// Kernels not found, including damaged ones.
    pub misses: u64,
    /// Damaged entries.
    pub damaged: u64,
    /// Kernels compiled.
    pub compiles: u64,
    /// Failures of the store that were ignored.
    pub failures: u64,
    /// Bytes of kernel files read.
    pub bytes_read: u64,
    /// Bytes of kernel files written.
    pub bytes_written: u64,
}

/// The counters behind [`StoreStats`]. Nothing synchronizes through them, so relaxed ordering is enough.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) hits: Counter,
    pub(crate) misses: Counter,
    pub(crate) damaged: Counter,
    pub(crate) compiles: Counter,
    pub(crate) failures: Counter,
    pub(crate) bytes_read: Counter,
    pub(crate) bytes_written: Counter,
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counters {
    pub(crate) fn stats(&self) -> StoreStats {
        StoreStats {
            hits: self.hits.get(),
            misses: self.misses.get(),
            damaged: self.damaged.get(),
            compiles: self.compiles.get(),
            failures: self.failures.get(),
            bytes_read: self.bytes_read.get(),
            bytes_written: self.bytes_written.get(),
        }
    }
}
