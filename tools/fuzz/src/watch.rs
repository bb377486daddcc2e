//! Watches one input at a time: panics, memory, work, time.

use crate::heap::Since;
use crate::surface::Surface;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

/// A forbidden behaviour on an input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault(pub String);

/// Time after which an input counts as a hang: a hundred times what a slow
/// machine takes for the slowest input. [`Surface::work`] bounds the work.
const HANG: Duration = Duration::from_secs(60);

thread_local! {
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// The watch over inputs of this process.
pub struct Watch {
    begun: Arc<AtomicU64>,
    start: Instant,
}

impl Watch {
    /// Captures the output of panics and starts looking for hangs; the process
    /// aborts after one.
    pub fn new() -> Watch {
        set_hook(Box::new(|panic| {
            PANIC.with_borrow_mut(|text| *text = panic.to_string());
        }));
        let (begun, start) = (Arc::new(AtomicU64::new(u64::MAX)), Instant::now());
        let seen = begun.clone();
        spawn(move || {
            loop {
                sleep(Duration::from_secs(1));
                let since = (start.elapsed().as_millis() as u64).checked_sub(seen.load(Relaxed));
                if since.is_some_and(|ms| u128::from(ms) > HANG.as_millis()) {
                    eprintln!("an input hangs: more than {} s", HANG.as_secs());
                    std::process::abort();
                }
            }
        });
        Watch { begun, start }
    }

    /// Runs an input; returns true if it was accepted.
    pub fn check(&self, surface: &mut dyn Surface, input: &[u8]) -> Result<bool, Fault> {
        self.begun
            .store(self.start.elapsed().as_millis() as u64, Relaxed);
        let since = Since::now();
        let done = catch_unwind(AssertUnwindSafe(|| surface.check(input)));
        let (peak, total) = (since.peak(), since.total());
        self.begun.store(u64::MAX, Relaxed);
        let accepted = match done {
            Ok(answer) => answer.map_err(Fault)?,
            Err(_) => return Err(Fault(PANIC.take())),
        };
        let (memory, work) = (surface.memory(input.len()), surface.work(input.len()));
        if peak > memory {
            let length = input.len();
            return Err(Fault(format!(
                "{length} bytes of input took {peak} bytes at once, more than {memory}"
            )));
        }
        if total > work {
            let length = input.len();
            return Err(Fault(format!(
                "{length} bytes of input took {total} bytes in all, more than {work}"
            )));
        }
        Ok(accepted)
    }
}

impl Default for Watch {
    fn default() -> Self {
        Watch::new()
    }
}
