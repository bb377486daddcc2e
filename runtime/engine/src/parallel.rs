//! A loop over all cores, for compiles.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs `job` on every item, on up to one thread per core, and returns the results in the order of
/// the items. One item runs on the caller's thread.
pub(crate) fn parallel<T: Sync, R: Send>(items: &[T], job: impl Fn(&T) -> R + Sync) -> Vec<R> {
    parallel_on(cores(), items, job)
}

/// Returns the number of cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Runs [`parallel`] on at most `threads` threads.
pub(crate) fn parallel_on<T: Sync, R: Send>(
    threads: usize,
    items: &[T],
    job: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let threads = threads.min(items.len());
    if threads <= 1 {
        return items.iter().map(job).collect();
    }
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<R>>> = items.iter().map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    // Compile times differ widely, so threads take one item after the other instead
                    // of equal shares. The end of the scope publishes the results, so the counter
                    // needs no ordering.
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(at) else { break };
                    *results[at].lock().expect("no other thread has this slot") = Some(job(item));
                }
            });
        }
    });
    results
        .into_iter()
        .map(|slot| {
            slot.into_inner()
                .ok()
                .flatten()
                .expect("every item was run")
        })
        .collect()
}
