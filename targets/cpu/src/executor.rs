//! Runs the blocks of a grid on several threads.

use crate::lanes::{Help, Lane, Lanes, drain};
use crate::nodes::{Nodes, host_nodes};
use crate::pool::ThreadPool;
use crate::shared::SharedPool;
use moesaic_target::DeviceError;
use std::cell::Cell;
use std::io;
use std::sync::OnceLock;

/// The threads of a device and their places.
pub(crate) struct Executor {
    threads: Threads,
    nodes: Nodes,
    /// The lanes while the system moves the threads.
    loose: Lanes,
    /// The lanes once the threads stay on their processors.
    pinned: OnceLock<Lanes>,
}

thread_local! {
    /// Number of nested placements that this thread has begun.
    static PLACING: Cell<usize> = const { Cell::new(0) };
}

/// Makes this thread's runs leave each lane to the lane's own threads, until
/// [`end_placing`].
pub(crate) fn begin_placing() {
    PLACING.set(PLACING.get() + 1);
}

/// Ends one [`begin_placing`]; call it once for each.
pub(crate) fn end_placing() {
    PLACING.set(PLACING.get() - 1);
}

fn help() -> Help {
    match PLACING.get() {
        0 => Help::AtOnce,
        _ => Help::IfNobodyComes,
    }
}

enum Threads {
    /// The calling thread and the threads that devices share.
    Shared(SharedPool),
    /// The calling thread alone.
    Alone,
    /// The calling thread and these threads.
    Own(ThreadPool),
}

impl Executor {
    /// Makes an executor of the calling thread and the threads that devices
    /// share.
    pub(crate) fn shared() -> Executor {
        Executor::on(host_nodes().clone(), Threads::Shared(SharedPool::new()))
    }

    /// Makes an executor of exactly `threads` threads, the caller included.
    pub(crate) fn of(threads: usize, nodes: Nodes) -> io::Result<Executor> {
        let threads = match threads {
            0 | 1 => Threads::Alone,
            _ => Threads::Own(ThreadPool::new(threads - 1)?),
        };
        Ok(Executor::on(nodes, threads))
    }

    fn on(nodes: Nodes, threads: Threads) -> Executor {
        Executor {
            threads,
            loose: Lanes::loose(&nodes),
            nodes,
            pinned: OnceLock::new(),
        }
    }

    pub(crate) fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    pub(crate) fn threads(&self) -> usize {
        match &self.threads {
            Threads::Shared(shared) => shared.threads(),
            Threads::Alone => 1,
            Threads::Own(pool) => pool.workers() + 1,
        }
    }

    /// Keeps each of its own threads on a processor of its own.
    pub(crate) fn pin(&self) -> io::Result<()> {
        let Threads::Own(pool) = &self.threads else {
            return Ok(());
        };
        let order = self.nodes.in_turns(&crate::affinity::processors()?);
        pool.pin(&order)?;
        let places = order.iter().cycle().take(self.threads());
        self.pinned
            .get_or_init(|| Lanes::pinned(&self.nodes, places));
        Ok(())
    }

    fn lanes(&self) -> &Lanes {
        self.pinned.get().unwrap_or(&self.loose)
    }

    /// Prepares `bytes` bytes of scratch memory for each thread but the caller,
    /// which takes its own in its first run.
    pub(crate) fn provide(&self, bytes: usize) -> Result<(), DeviceError> {
        match self.pool() {
            Some(pool) => pool.provide(bytes),
            None => Ok(()),
        }
    }

    /// Keeps the threads awake, once they are, until [`Executor::end_pass`].
    pub(crate) fn begin_pass(&self) {
        if let Some(pool) = self.pool() {
            pool.begin_pass();
        }
    }

    pub(crate) fn end_pass(&self) {
        if let Some(pool) = self.pool() {
            pool.end_pass();
        }
    }

    fn pool(&self) -> Option<&ThreadPool> {
        match &self.threads {
            Threads::Own(pool) => Some(pool),
            Threads::Shared(shared) => Some(shared.pool()),
            Threads::Alone => None,
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
        let places = self.lanes();
        let (one, several);
        let lanes: &[Lane] = match places.count() {
            1 => {
                one = [Lane::new(0, blocks, threads)];
                &one
            }
            count => {
                several = places.cut(blocks, threads);
                &several[..count]
            }
        };
        // The lane of a thread is asked for once a run. Launches are short, and
        // a thread that the system moves meanwhile is slower, not wrong.
        let help = help();
        let share = || drain(lanes, places.here(), help, &work);
        let helpers = (threads.min(blocks) - 1) as usize;
        match self.pool() {
            Some(pool) => pool.run(helpers, &share),
            None => share(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicI64, Ordering};

    /// Returns `count` nodes with processors in turns, whatever this machine
    /// has.
    fn nodes(count: usize) -> Nodes {
        Nodes::new((0..count).map(|node| (node..64).step_by(count).collect()))
    }

    fn check(executor: &Executor, blocks: i64, what: &str) {
        let seen = Mutex::new(Vec::new());
        executor.run(blocks, |first, last| {
            assert!(first < last);
            seen.lock().unwrap().extend(first..last);
        });
        let mut seen = seen.into_inner().unwrap();
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..blocks), "{what}, {blocks} blocks");
    }

    #[test]
    fn every_block_runs_once() {
        for threads in [1, 2, 3, 7] {
            for count in [1, 2, 3, 20] {
                let executor = Executor::of(threads, nodes(count)).unwrap();
                for blocks in [0, 1, 2, 3, 13, 64, 1001] {
                    check(
                        &executor,
                        blocks,
                        &format!("{threads} threads, {count} nodes"),
                    );
                }
            }
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn shares_follow_pinned_threads() {
        let here = crate::affinity::processors().unwrap();
        let odd = Nodes::new([vec![here[0]], here[1..].to_vec(), vec![9999]]);
        let executor = Executor::of(3, odd.clone()).unwrap();
        assert_eq!(executor.lanes(), &Lanes::loose(&odd));
        executor.pin().unwrap();
        let expected = Lanes::pinned(&odd, here.iter().cycle().take(3));
        assert_eq!(executor.lanes(), &expected);
        check(&executor, 1001, "pinned");
        executor.pin().unwrap();
        check(&executor, 1001, "pinned again");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_thread_begins_with_the_blocks_of_its_node() {
        let here = crate::affinity::processors().unwrap();
        if here.len() < 2 {
            return; // one processor has one node
        }
        let two = Nodes::new([here[..1].to_vec(), here[1..].to_vec()]);
        let executor = Executor::of(2, two).unwrap();
        executor.pin().unwrap();
        let caller = std::thread::current().id();
        let begun = AtomicI64::new(-1);
        executor.run(1000, |first, _| {
            if std::thread::current().id() != caller {
                let _ = begun.compare_exchange(-1, first, Ordering::Relaxed, Ordering::Relaxed);
            }
            // The other blocks wait for the worker.
            while begun.load(Ordering::Relaxed) < 0 {
                std::thread::yield_now();
            }
        });
        assert!(begun.into_inner() >= 500);
    }

    #[test]
    fn devices_run_side_by_side() {
        let total = AtomicI64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    Executor::shared().run(100, |first, last| {
                        total.fetch_add(last - first, Ordering::Relaxed);
                    });
                });
            }
        });
        assert_eq!(total.into_inner(), 800);
    }
}
