//! Work spread over the processors of this machine.

use std::sync::Mutex;
use std::thread::{available_parallelism, scope};

/// Calls `work` on every item, on as many threads as there are processors. Items are taken in
/// order, so results depend on the items alone and never on the number of threads.
pub fn for_each<T: Send>(items: impl IntoIterator<Item = T>, work: impl Fn(T) + Sync) {
    let items: Vec<T> = items.into_iter().collect();
    let threads = available_parallelism().map_or(1, usize::from);
    let others = threads.min(items.len()).saturating_sub(1);
    let left = Mutex::new(items.into_iter());
    // The lock is held for taking an item only: a `while let` on the guard would hold it longer.
    let take = || left.lock().expect("no thread panicked").next();
    let drain = || {
        while let Some(item) = take() {
            work(item);
        }
    };
    scope(|scope| {
        for _ in 0..others {
            scope.spawn(drain);
        }
        drain();
    });
}
