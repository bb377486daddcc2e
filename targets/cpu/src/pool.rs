//! A thread pool whose runs allocate nothing.
//!
//! The caller publishes a run in a slot. Workers that see the slot join, work
//! beside the caller and leave. The caller closes the slot when its own share
//! is done and waits for the workers that joined. A worker that was still
//! asleep then has missed nothing, and nobody waits for it. After a run workers
//! listen for the next one for a short while, or for the length of a pass,
//! whose next launch may come any moment; then they sleep.
//!
//! Several callers have a slot each, and no caller waits for another. Workers
//! go from slot to slot, also to runs that began while they were busy.

use crate::scratch::{self, Supply};
use moesaic_target::DeviceError;
use std::cell::UnsafeCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread::{self, JoinHandle};

/// The work that every thread of a run calls once.
type Work<'a> = dyn Fn() + Sync + 'a;

/// Number of times a worker listens before it sleeps: tens of microseconds.
const LOOKS: u32 = 1000;

/// Number of simultaneous runs that workers help; a caller beyond them works
/// alone.
const SLOTS: usize = 8;

/// Set in `Slot::gate` while workers may join; the rest counts those inside.
const OPEN: u32 = 1 << 31;

/// The workers besides the calling threads.
pub(crate) struct ThreadPool {
    state: Arc<State>,
    workers: Vec<Worker>,
}

struct Worker {
    asleep: Arc<AtomicBool>,
    /// `None` once the pool is dropped.
    thread: Option<JoinHandle<()>>,
}

/// The state that callers and workers share.
struct State {
    slots: [Slot; SLOTS],
    /// Counts the runs of all slots, so that a worker notices a new one.
    bell: AtomicU64,
    /// Number of workers that have started.
    present: AtomicUsize,
    /// Number of passes whose launches are not over: nobody goes to sleep
    /// meanwhile.
    passes: AtomicUsize,
    ended: AtomicBool,
    /// Scratch memory of the workers.
    supply: Arc<Supply>,
}

/// The place of a run's work. A slot has cache lines of its own, so workers of
/// one run do not slow down those of another.
#[repr(align(128))]
struct Slot {
    /// Held by the caller of the current run.
    turn: Mutex<()>,
    /// `OPEN` and the number of workers inside.
    gate: AtomicU32,
    /// Counts the runs of this slot, so that a worker joins each once.
    run: AtomicU64,
    /// Read only inside the gate, written only while it is shut and empty.
    work: UnsafeCell<Option<&'static Work<'static>>>,
    panicked: AtomicBool,
}

// SAFETY: `work` is written by the one caller that holds the turn while the gate
// is shut and empty, and read by workers that entered the gate afterwards.
unsafe impl Sync for Slot {}
// SAFETY: what `work` refers to is Sync.
unsafe impl Send for Slot {}

impl ThreadPool {
    /// Starts `workers` threads.
    pub(crate) fn new(workers: usize) -> io::Result<ThreadPool> {
        let mut pool = ThreadPool::empty();
        (0..workers).try_for_each(|_| pool.start_worker())?;
        pool.assemble();
        Ok(pool)
    }

    /// Starts `workers` threads, or as many as the system allows.
    pub(crate) fn up_to(workers: usize) -> ThreadPool {
        let mut pool = ThreadPool::empty();
        let _fewer_will_do = (0..workers).try_for_each(|_| pool.start_worker());
        pool.assemble();
        pool
    }

    /// Waits until all threads run, so that the cost and the allocations of
    /// their start fall into no launch.
    fn assemble(&self) {
        let mut looks = 0;
        while self.state.present.load(Ordering::Acquire) < self.workers.len() {
            pause(&mut looks);
        }
    }

    fn empty() -> ThreadPool {
        ThreadPool {
            state: Arc::new(State::new()),
            workers: Vec::new(),
        }
    }

    /// Starts one more thread.
    fn start_worker(&mut self) -> io::Result<()> {
        let asleep = Arc::new(AtomicBool::new(false));
        let (state, flag) = (Arc::clone(&self.state), Arc::clone(&asleep));
        let thread = thread::Builder::new()
            .name(format!("moesaic-cpu-{}", self.workers.len()))
            .spawn(move || state.serve(&flag))?;
        self.workers.push(Worker {
            asleep,
            thread: Some(thread),
        });
        Ok(())
    }

    pub(crate) fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Keeps workers awake until [`ThreadPool::end_pass`].
    pub(crate) fn begin_pass(&self) {
        self.state.passes.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends one [`ThreadPool::begin_pass`]; call it once for each.
    pub(crate) fn end_pass(&self) {
        self.state.passes.fetch_sub(1, Ordering::Relaxed);
    }

    /// Ensures that runs with `bytes` bytes of scratch memory allocate nothing
    /// on a worker, whenever it first joins one.
    pub(crate) fn provide(&self, bytes: usize) -> Result<(), DeviceError> {
        self.state.supply.provide(self.workers(), bytes)
    }

    /// Calls `work` on this thread while `helpers` woken workers do the same;
    /// returns when all calls have. A worker that comes too late does not call
    /// it, and one that comes twice calls it twice, so `work` must look for
    /// what is left to do.
    ///
    /// # Panics
    /// Panics when `work` did.
    pub(crate) fn run(&self, helpers: usize, work: &Work<'_>) {
        let Some((slot, _turn)) = self.state.free_slot() else {
            return work();
        };
        // SAFETY: the reference is dropped from the slot by `Shut`, which
        // waits for every worker that can see it, before this call returns.
        let work_for_slot =
            unsafe { std::mem::transmute::<&Work<'_>, &'static Work<'static>>(work) };
        let shut = slot.open(work_for_slot);
        self.state.bell.fetch_add(1, Ordering::SeqCst);
        for worker in self.workers.iter().take(helpers) {
            worker.wake();
        }
        work();
        drop(shut);
        if slot.panicked.swap(false, Ordering::Relaxed) {
            panic!("a block panicked on another thread");
        }
    }

    /// Keeps worker `i` on the `i + 1`-th of these processors; the first is
    /// left to the caller. More workers than processors go round.
    pub(crate) fn pin(&self, processors: &[usize]) -> io::Result<()> {
        let threads = self
            .workers
            .iter()
            .filter_map(|worker| worker.thread.as_ref());
        crate::affinity::spread(threads, processors)
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.state.ended.store(true, Ordering::SeqCst);
        self.state.bell.fetch_add(1, Ordering::SeqCst);
        for worker in &mut self.workers {
            worker.wake();
            if let Some(thread) = worker.thread.take() {
                // A worker's panic was passed on to the caller of its run.
                let _ = thread.join();
            }
        }
    }
}

impl Worker {
    /// Wakes the worker if it sleeps. Sequentially consistent with
    /// `State::rest`: either the worker hears the bell, or this call sees that
    /// it is asleep.
    fn wake(&self) {
        if self.asleep.swap(false, Ordering::SeqCst)
            && let Some(thread) = &self.thread
        {
            thread.thread().unpark();
        }
    }
}

impl State {
    fn new() -> State {
        State {
            slots: [const { Slot::new() }; SLOTS],
            bell: AtomicU64::new(0),
            present: AtomicUsize::new(0),
            passes: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
            supply: Arc::default(),
        }
    }

    /// Returns an unused slot and the right to use it.
    fn free_slot(&self) -> Option<(&Slot, MutexGuard<'_, ()>)> {
        let mut slots = self.slots.iter();
        slots.find_map(|slot| Some((slot, slot.try_turn()?)))
    }

    /// Runs the loop of a worker.
    fn serve(&self, asleep: &AtomicBool) {
        scratch::live_on(Arc::clone(&self.supply));
        self.present.fetch_add(1, Ordering::Release);
        let mut heard = 0;
        let mut seen = [0; SLOTS];
        loop {
            heard = self.rest(heard, asleep);
            if self.ended.load(Ordering::SeqCst) {
                return;
            }
            while self.join_any(&mut seen) {}
        }
    }

    /// Waits for the bell after the `heard`-th ring; returns its number.
    fn rest(&self, heard: u64, asleep: &AtomicBool) -> u64 {
        let (mut idle, mut looks) = (0, 0);
        while idle < LOOKS {
            let rings = self.bell.load(Ordering::Acquire);
            if rings != heard {
                return rings;
            }
            idle = match self.passes.load(Ordering::Relaxed) {
                0 => idle + 1,
                _ => 0,
            };
            pause(&mut looks);
        }
        loop {
            asleep.store(true, Ordering::SeqCst);
            let rings = self.bell.load(Ordering::SeqCst);
            if rings != heard {
                asleep.store(false, Ordering::SeqCst);
                return rings;
            }
            thread::park();
        }
    }

    /// Joins each run that this worker has not seen; returns true if there was
    /// one.
    fn join_any(&self, seen: &mut [u64; SLOTS]) -> bool {
        let mut some = false;
        for (slot, seen) in self.slots.iter().zip(seen) {
            let run = slot.run.load(Ordering::Acquire);
            if run != *seen {
                *seen = run;
                some = true;
                slot.join();
            }
        }
        some
    }
}

/// Shuts the gate and waits until all workers have left, also while unwinding.
struct Shut<'a>(&'a Slot);

impl Drop for Shut<'_> {
    fn drop(&mut self) {
        self.0.gate.fetch_and(!OPEN, Ordering::AcqRel);
        let mut looks = 0;
        while self.0.gate.load(Ordering::Acquire) != 0 {
            pause(&mut looks);
        }
        // SAFETY: the gate is shut and empty, and this caller has the turn.
        unsafe { *self.0.work.get() = None };
    }
}

impl Slot {
    const fn new() -> Slot {
        Slot {
            turn: Mutex::new(()),
            gate: AtomicU32::new(0),
            run: AtomicU64::new(0),
            work: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
        }
    }

    fn try_turn(&self) -> Option<MutexGuard<'_, ()>> {
        match self.turn.try_lock() {
            Ok(turn) => Some(turn),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Opens the gate; only the caller that has the turn may call it.
    fn open(&self, work: &'static Work<'static>) -> Shut<'_> {
        // SAFETY: the gate is shut and empty since the last run's `Shut`, and
        // this caller has the turn.
        unsafe { *self.work.get() = Some(work) };
        self.panicked.store(false, Ordering::Relaxed);
        self.gate.store(OPEN, Ordering::Release);
        self.run.fetch_add(1, Ordering::Release);
        Shut(self)
    }

    /// Works in the current run, if it is still open.
    fn join(&self) {
        let enter = |gate| (gate & OPEN != 0).then_some(gate + 1);
        if self
            .gate
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, enter)
            .is_err()
        {
            return;
        }
        // SAFETY: inside the gate nobody writes it.
        if let Some(work) = unsafe { *self.work.get() }
            && catch_unwind(AssertUnwindSafe(work)).is_err()
        {
            self.panicked.store(true, Ordering::Relaxed);
        }
        self.gate.fetch_sub(1, Ordering::Release);
    }
}

/// Waits a moment for a running thread; yields when the wait takes long,
/// because that thread may have lost its processor.
fn pause(looks: &mut u32) {
    if *looks < LOOKS {
        *looks += 1;
        std::hint::spin_loop();
    } else {
        thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_stay_awake_during_a_pass() {
        let pool = ThreadPool::new(2).unwrap();
        pool.begin_pass();
        pool.run(2, &|| {});
        let asleep = |w: &Worker| w.asleep.load(Ordering::SeqCst);
        thread::sleep(std::time::Duration::from_millis(20));
        assert!(!pool.workers.iter().any(asleep), "a pass is not over");
        pool.end_pass();
        while !pool.workers.iter().all(asleep) {
            thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    #[test]
    fn runs_follow_each_other_and_sleep_between() {
        let pool = ThreadPool::new(3).unwrap();
        for round in 0..2000 {
            let (calls, room) = (AtomicUsize::new(0), [const { AtomicU64::new(0) }; 4]);
            pool.run(3, &|| {
                let call = calls.fetch_add(1, Ordering::Relaxed);
                if let Some(place) = room.get(call) {
                    place.store(round + 1, Ordering::Relaxed);
                }
            });
            let calls = calls.into_inner();
            assert!(calls >= 1);
            for place in &room[..calls.min(4)] {
                assert_eq!(place.load(Ordering::Relaxed), round + 1);
            }
            if round % 500 == 0 {
                thread::sleep(std::time::Duration::from_millis(5));
            }
        }
    }

    /// More callers than slots, each with work of its own.
    #[test]
    fn several_callers_have_runs_of_their_own() {
        let pool = ThreadPool::new(2).unwrap();
        thread::scope(|scope| {
            for _ in 0..SLOTS + 3 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let left = AtomicUsize::new(50);
                        let done = AtomicUsize::new(0);
                        let take = |left: usize| left.checked_sub(1);
                        pool.run(2, &|| {
                            let order = Ordering::Relaxed;
                            while left.fetch_update(order, order, take).is_ok() {
                                done.fetch_add(1, order);
                            }
                        });
                        assert_eq!(done.into_inner(), 50);
                    }
                });
            }
        });
    }

    /// A run inside a run has a slot of its own and needs no worker.
    #[test]
    fn runs_nest() {
        let pool = ThreadPool::new(1).unwrap();
        let calls = AtomicUsize::new(0);
        pool.run(1, &|| {
            pool.run(1, &|| {
                calls.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert!(calls.into_inner() >= 1);
    }

    /// A worker that is busy with a long run joins another when it is free.
    #[test]
    fn workers_come_to_runs_that_began_while_they_were_busy() {
        let pool = ThreadPool::new(1).unwrap();
        let (busy, free) = (AtomicBool::new(false), AtomicBool::new(false));
        let wait_for = |flag: &AtomicBool| {
            while !flag.load(Ordering::Relaxed) {
                thread::yield_now();
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                let caller = thread::current().id();
                pool.run(1, &|| {
                    if thread::current().id() != caller {
                        busy.store(true, Ordering::Relaxed);
                        wait_for(&free);
                    } else {
                        wait_for(&busy);
                    }
                });
            });
            wait_for(&busy);
            let (caller, helped) = (thread::current().id(), AtomicBool::new(false));
            pool.run(1, &|| {
                if thread::current().id() == caller {
                    free.store(true, Ordering::Relaxed);
                    wait_for(&helped);
                } else {
                    helped.store(true, Ordering::Relaxed);
                }
            });
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let pool = ThreadPool::new(1).unwrap();
        let caller = thread::current().id();
        // The worker may be late for a short run, so the caller waits for it.
        let reached = AtomicBool::new(false);
        let ended = catch_unwind(AssertUnwindSafe(|| {
            pool.run(1, &|| {
                if thread::current().id() != caller {
                    reached.store(true, Ordering::Relaxed);
                    panic!("on a worker");
                }
                while !reached.load(Ordering::Relaxed) {
                    thread::yield_now();
                }
            });
        }));
        assert!(ended.is_err());
        let calls = AtomicUsize::new(0);
        pool.run(1, &|| {
            calls.fetch_add(1, Ordering::Relaxed);
        });
        assert!(calls.into_inner() >= 1);
    }

    #[test]
    fn threads_can_be_pinned() {
        let pool = ThreadPool::new(3).unwrap();
        pool.pin(&crate::affinity::processors().unwrap()).unwrap();
        let calls = AtomicUsize::new(0);
        pool.run(3, &|| {
            calls.fetch_add(1, Ordering::Relaxed);
        });
        assert!(calls.into_inner() >= 1);
    }
}
