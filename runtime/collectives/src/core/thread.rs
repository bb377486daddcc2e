//! The work of a progress thread.

use super::Shared;
use crate::handle::{PAUSE, SPINS};
use crate::progress_thread::{Bell, ProgressThread};
use std::sync::Arc;

/// Starts the progress thread of a core. Returns `None` where the system refuses one; calls then
/// make all progress.
pub(crate) fn start_progress_thread(core: &Arc<Shared>) -> Option<Arc<ProgressThread>> {
    let (driven, last) = (Arc::clone(core), Arc::clone(core));
    let thread = ProgressThread::start(
        move |bell| drive(&driven, bell),
        move || last.lock().forget_progress_thread(),
    )?;
    let thread = Arc::new(thread);
    let bell = Arc::clone(thread.bell());
    core.lock().drive_by(Arc::downgrade(&thread), bell);
    Some(thread)
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
