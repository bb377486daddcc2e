//! A thread that makes progress while a rank computes.

use crate::core::Shared;
use crate::handle::{PAUSE, SPINS};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// A thread that moves the messages of a world between calls, for as long as you hold it. It
/// sleeps while nothing is in flight. A call that waits drives its own operation and leaves the
/// others to this thread.
pub struct ProgressThread {
    core: Arc<Shared>,
    bell: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
}

/// The signal that wakes a progress thread.
#[derive(Default)]
pub(crate) struct Bell {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    rung: bool,
    ends: bool,
}

impl Bell {
    /// Signals that an operation has begun.
    pub fn ring(&self) {
        self.state().rung = true;
        self.changed.notify_one();
    }

    fn end(&self) {
        self.state().ends = true;
        self.changed.notify_one();
    }

    fn ends(&self) -> bool {
        self.state().ends
    }

    /// Waits for work; returns false when the thread must end.
    fn wait(&self) -> bool {
        let mut state = self.state();
        while !state.rung && !state.ends {
            state = match self.changed.wait(state) {
                Ok(state) => state,
                Err(poisoned) => poisoned.into_inner(),
            };
        }
        state.rung = false;
        !state.ends
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProgressThread {
    /// Starts the thread. Returns `None` where the system refuses one; calls then make all
    /// progress.
    pub(crate) fn start(core: &Arc<Shared>) -> Option<Arc<ProgressThread>> {
        let bell = Arc::new(Bell::default());
        let (own, rings) = (Arc::clone(core), Arc::clone(&bell));
        let name = "exchanges".to_string();
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            while rings.wait() {
                drive(&own, &rings);
            }
        });
        let progress_thread = Arc::new(ProgressThread {
            core: Arc::clone(core),
            bell: Arc::clone(&bell),
            thread: Some(thread.ok()?),
        });
        core.lock().drive_by(Arc::downgrade(&progress_thread), bell);
        Some(progress_thread)
    }
}

/// Makes progress until nothing is in flight.
fn drive(core: &Shared, bell: &Bell) {
    let mut idle = 0u32;
    while !bell.ends() {
        // The rank comes first, and only one message moves at a time: what the rank waits for
        // must not wait for a message that it does not need yet.
        let moved = match core.lock_unless_wanted() {
            None => false,
            Some(core) if !core.is_busy() => return,
            Some(mut core) => core.nudge(),
        };
        idle = if moved { 0 } else { idle + 1 };
        match idle {
            0..SPINS => std::thread::yield_now(),
            _ => std::thread::sleep(PAUSE),
        }
    }
}

impl Drop for ProgressThread {
    fn drop(&mut self) {
        self.core.lock().forget_progress_thread();
        self.bell.end();
        if let Some(thread) = self.thread.take() {
            // The thread has no result of its own; its failures are reported by the operations.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for ProgressThread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ProgressThread")
    }
}
