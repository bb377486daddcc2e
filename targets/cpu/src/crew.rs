//! Running the blocks of a grid on several threads.

use crate::shared::Shared;
use crate::team::Team;
use std::io;
use std::sync::atomic::{AtomicI64, Ordering};

/// The threads of a device.
pub(crate) enum Crew {
    /// The calling thread and those that devices share.
    Shared(Shared),
    /// Only the calling thread.
    Alone,
    /// The calling thread and these.
    Own(Team),
}

impl Crew {
    /// A crew of exactly `threads` threads, the caller included.
    pub(crate) fn of(threads: usize) -> io::Result<Crew> {
        match threads {
            0 | 1 => Ok(Crew::Alone),
            _ => Team::new(threads - 1).map(Crew::Own),
        }
    }

    pub(crate) fn threads(&self) -> usize {
        match self {
            Crew::Shared(shared) => shared.threads(),
            Crew::Alone => 1,
            Crew::Own(team) => team.workers() + 1,
        }
    }

    /// Keeps each of its own threads on a processor of its own.
    pub(crate) fn pin(&self) -> io::Result<()> {
        match self {
            Crew::Own(team) => team.pin(),
            Crew::Shared(_) | Crew::Alone => Ok(()),
        }
    }

    /// Calls `work(first, last)` over disjoint ranges that cover `0..blocks`,
    /// and returns when all calls have. The calling thread works too.
    pub(crate) fn run(&self, blocks: i64, work: impl Fn(i64, i64) + Sync) {
        let threads = self.threads() as i64;
        if threads <= 1 || blocks <= 1 {
            if blocks > 0 {
                work(0, blocks);
            }
            return;
        }
        let queue = Queue::new(blocks, threads);
        let drain = || {
            while let Some((first, last)) = queue.take() {
                work(first, last);
            }
        };
        let helpers = (threads.min(blocks) - 1) as usize;
        match self {
            Crew::Own(team) => team.run(helpers, &drain),
            Crew::Shared(shared) => shared.team().run(helpers, &drain),
            Crew::Alone => drain(),
        }
    }
}

/// Hands out ranges of blocks that shrink towards the end: long ones first,
/// so that neighbours share a cache, single ones last, so that all threads
/// finish together whatever a block costs.
struct Queue {
    next: AtomicI64,
    blocks: i64,
    threads: i64,
}

/// Parts each thread's fair share of the rest is cut into.
const PARTS: i64 = 4;

impl Queue {
    fn new(blocks: i64, threads: i64) -> Queue {
        Queue {
            next: AtomicI64::new(0),
            blocks,
            threads,
        }
    }

    fn take(&self) -> Option<(i64, i64)> {
        let length = |first: i64| ((self.blocks - first) / (PARTS * self.threads)).max(1);
        let step = |first| (first < self.blocks).then(|| first + length(first));
        // Relaxed: the ranges are disjoint by the counter's own atomicity,
        // and the end of the run publishes the results.
        let first = self
            .next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, step)
            .ok()?;
        Some((first, first + length(first)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn every_block_runs_once() {
        for threads in [1, 2, 3, 7] {
            let crew = Crew::of(threads).unwrap();
            for blocks in [0, 1, 2, 3, 13, 64, 1001] {
                let seen = Mutex::new(Vec::new());
                crew.run(blocks, |first, last| {
                    assert!(first < last);
                    seen.lock().unwrap().extend(first..last);
                });
                let mut seen = seen.into_inner().unwrap();
                seen.sort_unstable();
                assert!(
                    seen.into_iter().eq(0..blocks),
                    "{threads} threads, {blocks} blocks"
                );
            }
        }
    }

    #[test]
    fn calls_are_few_and_end_small() {
        let queue = Queue::new(10_000, 8);
        let ranges: Vec<_> = std::iter::from_fn(|| queue.take()).collect();
        assert!(ranges.len() < 300, "{}", ranges.len());
        assert!(ranges[0].1 - ranges[0].0 > 100);
        assert!(
            ranges[ranges.len() - 16..]
                .iter()
                .all(|(first, last)| last - first == 1)
        );
    }

    #[test]
    fn devices_run_side_by_side() {
        let total = AtomicI64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    Crew::Shared(Shared::new()).run(100, |first, last| {
                        total.fetch_add(last - first, Ordering::Relaxed);
                    });
                });
            }
        });
        assert_eq!(total.into_inner(), 800);
    }
}
