//! Counters.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a store did since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Kernels found.
    pub hits: u64,
    /// Kernels not found, the damaged ones among them.
    pub misses: u64,
    /// Entries that were there and damaged.
    pub damaged: u64,
    /// Kernels compiled.
    pub compiles: u64,
    /// Store failures that were passed over.
    pub failures: u64,
    /// Bytes of kernel files read.
    pub bytes_read: u64,
    /// Bytes of kernel files written.
    pub bytes_written: u64,
}

/// The counters behind [`Stats`]. They count and order nothing, so relaxed
/// operations do.
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
    pub(crate) fn stats(&self) -> Stats {
        Stats {
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
