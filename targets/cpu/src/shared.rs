//! The threads of all devices that have none of their own.

use crate::pool::ThreadPool;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

/// The pool of the process, while a device uses it; its threads end with the
/// last such device. Devices have nothing else in common, and results do not
/// depend on threads.
static POOL: Mutex<Weak<ThreadPool>> = Mutex::new(Weak::new());

/// A device's share in the pool; the first run starts the threads.
pub(crate) struct SharedPool {
    threads: usize,
    pool: OnceLock<Arc<ThreadPool>>,
}

impl SharedPool {
    /// Makes a share of as many threads as this process may use processors, a
    /// caller included.
    pub(crate) fn new() -> SharedPool {
        SharedPool {
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            pool: OnceLock::new(),
        }
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    pub(crate) fn pool(&self) -> &ThreadPool {
        self.pool.get_or_init(|| current(&POOL, self.threads - 1))
    }
}

/// Returns the existing pool, or a new one.
fn current(known: &Mutex<Weak<ThreadPool>>, workers: usize) -> Arc<ThreadPool> {
    let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
    known.upgrade().unwrap_or_else(|| {
        let pool = Arc::new(ThreadPool::up_to(workers));
        *known = Arc::downgrade(&pool);
        pool
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_team_is_shared_and_ends_with_its_last_user() {
        let known = Mutex::new(Weak::new());
        let (first, second) = (current(&known, 1), current(&known, 3));
        assert!(Arc::ptr_eq(&first, &second));
        let weak = Arc::downgrade(&first);
        drop((first, second));
        assert!(weak.upgrade().is_none());
        assert_eq!(current(&known, 3).workers(), 3);
    }

    #[test]
    fn devices_have_the_same_team() {
        let (first, second) = (SharedPool::new(), SharedPool::new());
        assert!(std::ptr::eq(first.pool(), second.pool()));
        assert_eq!(first.pool().workers() + 1, first.threads());
    }
}
