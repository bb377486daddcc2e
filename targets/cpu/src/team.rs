//! Threads that wait for work: made once, and nothing is allocated per run.
//!
//! A run is published on a board. Workers that look at it join, work beside the
//! caller and leave; the caller closes the board when its own share is done and
//! waits for those that joined. A worker that was still asleep then has missed
//! nothing, and nobody waits for it. After a run workers watch the board for a
//! short while, since the next launch of the same pass comes within
//! microseconds; then they sleep.

use std::cell::UnsafeCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// What every thread of a run calls once.
type Work<'a> = dyn Fn() + Sync + 'a;

/// Looks at the board before a worker sleeps: tens of microseconds.
const LOOKS: u32 = 1000;

/// Set in `Board::gate` while workers may join; the rest counts those inside.
const OPEN: u32 = 1 << 31;

/// Workers besides the calling thread.
pub(crate) struct Team {
    board: Arc<Board>,
    workers: Vec<Worker>,
    /// Runs of several callers take turns.
    turn: Mutex<()>,
}

struct Worker {
    asleep: Arc<AtomicBool>,
    /// Taken when the team is dropped.
    thread: Option<JoinHandle<()>>,
}

/// Where the work of a run is found.
struct Board {
    /// `OPEN` and the number of workers inside.
    gate: AtomicU32,
    /// Counts runs, so that a worker sees that there is a new one.
    run: AtomicU64,
    /// Read only inside the gate, written only while it is shut and empty.
    work: UnsafeCell<Option<&'static Work<'static>>>,
    ended: AtomicBool,
    panicked: AtomicBool,
}

// SAFETY: `work` is written by the one caller whose turn it is while the gate is
// shut and empty, and read by workers that entered the gate afterwards.
unsafe impl Sync for Board {}
// SAFETY: what `work` refers to is Sync.
unsafe impl Send for Board {}

impl Team {
    /// Starts `workers` threads.
    pub(crate) fn new(workers: usize) -> io::Result<Team> {
        let mut team = Team {
            board: Arc::new(Board::new()),
            workers: Vec::with_capacity(workers),
            turn: Mutex::new(()),
        };
        for index in 0..workers {
            let asleep = Arc::new(AtomicBool::new(false));
            let (board, flag) = (Arc::clone(&team.board), Arc::clone(&asleep));
            let thread = thread::Builder::new()
                .name(format!("moesaic-cpu-{index}"))
                .spawn(move || board.serve(&flag))?;
            team.workers.push(Worker {
                asleep,
                thread: Some(thread),
            });
        }
        Ok(team)
    }

    pub(crate) fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Calls `work` on this thread while `helpers` others are woken to do the
    /// same; returns when all calls have. One that comes late does not call it,
    /// and one that comes twice calls it twice: `work` asks what is left to do.
    ///
    /// # Panics
    /// When `work` did.
    pub(crate) fn run(&self, helpers: usize, work: &Work<'_>) {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the reference is dropped from the board by `Shut`, which
        // waits for every worker that can see it, before this call returns.
        let work_for_board =
            unsafe { std::mem::transmute::<&Work<'_>, &'static Work<'static>>(work) };
        let shut = self.board.open(work_for_board);
        for worker in self.workers.iter().take(helpers) {
            worker.wake();
        }
        work();
        drop(shut);
        if self.board.panicked.swap(false, Ordering::Relaxed) {
            panic!("a block panicked on another thread");
        }
    }

    /// Keeps worker `i` on the `i + 1`-th processor that this process may use;
    /// the first is left to the caller. More workers than processors go round.
    pub(crate) fn pin(&self) -> io::Result<()> {
        let threads = self
            .workers
            .iter()
            .filter_map(|worker| worker.thread.as_ref());
        crate::affinity::spread(threads)
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.board.ended.store(true, Ordering::SeqCst);
        self.board.run.fetch_add(1, Ordering::SeqCst);
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
    /// Wakes it if it sleeps. Sequentially consistent with `Board::rest`:
    /// either the worker sees the new run or this sees that it is asleep.
    fn wake(&self) {
        if self.asleep.swap(false, Ordering::SeqCst)
            && let Some(thread) = &self.thread
        {
            thread.thread().unpark();
        }
    }
}

/// Shuts the gate and waits until everybody has left, also while unwinding.
struct Shut<'a>(&'a Board);

impl Drop for Shut<'_> {
    fn drop(&mut self) {
        self.0.gate.fetch_and(!OPEN, Ordering::AcqRel);
        let mut looks = 0;
        while self.0.gate.load(Ordering::Acquire) != 0 {
            pause(&mut looks);
        }
        // SAFETY: the gate is shut and empty, and it is this caller's turn.
        unsafe { *self.0.work.get() = None };
    }
}

impl Board {
    fn new() -> Board {
        Board {
            gate: AtomicU32::new(0),
            run: AtomicU64::new(0),
            work: UnsafeCell::new(None),
            ended: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        }
    }

    fn open(&self, work: &'static Work<'static>) -> Shut<'_> {
        // SAFETY: the gate is shut and empty since the last run's `Shut`, and
        // it is this caller's turn.
        unsafe { *self.work.get() = Some(work) };
        self.panicked.store(false, Ordering::Relaxed);
        self.gate.store(OPEN, Ordering::Release);
        self.run.fetch_add(1, Ordering::SeqCst);
        Shut(self)
    }

    /// A worker's life.
    fn serve(&self, asleep: &AtomicBool) {
        let mut seen = 0;
        loop {
            seen = self.rest(seen, asleep);
            if self.ended.load(Ordering::SeqCst) {
                return;
            }
            self.join();
        }
    }

    /// Waits for a run after the `seen`-th; returns its number.
    fn rest(&self, seen: u64, asleep: &AtomicBool) -> u64 {
        for _ in 0..LOOKS {
            let run = self.run.load(Ordering::Acquire);
            if run != seen {
                return run;
            }
            std::hint::spin_loop();
        }
        loop {
            asleep.store(true, Ordering::SeqCst);
            let run = self.run.load(Ordering::SeqCst);
            if run != seen {
                asleep.store(false, Ordering::SeqCst);
                return run;
            }
            thread::park();
        }
    }

    /// Works in the present run, if it is still open.
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

/// A moment of waiting for a thread that runs; gives way when it takes long,
/// since that thread may have lost its processor.
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
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn runs_follow_each_other_and_sleep_between() {
        let team = Team::new(3).unwrap();
        for round in 0..2000 {
            let (calls, room) = (AtomicUsize::new(0), [const { AtomicU64::new(0) }; 4]);
            team.run(3, &|| {
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

    #[test]
    fn several_callers_take_turns() {
        let team = Team::new(2).unwrap();
        let total = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let once = AtomicBool::new(false);
                        team.run(2, &|| {
                            if !once.swap(true, Ordering::Relaxed) {
                                total.fetch_add(1, Ordering::Relaxed);
                            }
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 800);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let team = Team::new(1).unwrap();
        let caller = thread::current().id();
        // The worker may be late for a short run, so the caller waits for it.
        let reached = AtomicBool::new(false);
        let ended = catch_unwind(AssertUnwindSafe(|| {
            team.run(1, &|| {
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
        team.run(1, &|| {
            calls.fetch_add(1, Ordering::Relaxed);
        });
        assert!(calls.into_inner() >= 1);
    }

    #[test]
    fn threads_can_be_pinned() {
        let team = Team::new(3).unwrap();
        team.pin().unwrap();
        let calls = AtomicUsize::new(0);
        team.run(3, &|| {
            calls.fetch_add(1, Ordering::Relaxed);
        });
        assert!(calls.into_inner() >= 1);
    }
}
