//! A thread that makes progress while a rank computes.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// A thread that moves the messages of a world between calls, for as long as you hold it. It
/// sleeps while nothing is in flight. A call that waits drives its own operation and leaves the
/// others to this thread.
pub struct ProgressThread {
    forget: Box<dyn Fn() + Send + Sync>,
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

    pub fn ends(&self) -> bool {
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
    /// Starts the thread, which calls `work` after each ring of its bell. `forget` tells those who
    /// ring it that it ends. Returns `None` where the system refuses a thread.
    pub(crate) fn start(
        work: impl Fn(&Bell) + Send + 'static,
        forget: impl Fn() + Send + Sync + 'static,
    ) -> Option<ProgressThread> {
        let bell = Arc::new(Bell::default());
        let rings = Arc::clone(&bell);
        let name = "exchanges".to_string();
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            while rings.wait() {
                work(&rings);
            }
        });
        Some(ProgressThread {
            forget: Box::new(forget),
            bell,
            thread: Some(thread.ok()?),
        })
    }

    /// Returns the bell that wakes it.
    pub(crate) fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }
}

impl Drop for ProgressThread {
    fn drop(&mut self) {
        (self.forget)();
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
