//! Progress of the operations in flight: from calls alone, or from a progress thread as well.

use super::{Core, OpError};
use crate::progress_thread::{Bell, ProgressThread};
use std::sync::{Arc, Weak};

impl Core {
    /// Hands progress to a progress thread from now on.
    pub fn drive_by(&mut self, progress_thread: Weak<ProgressThread>, bell: Arc<Bell>) {
        self.progress_thread = Some((progress_thread, bell));
    }

    /// Forgets the progress thread that has ended, unless a new one has replaced it meanwhile.
    pub fn forget_progress_thread(&mut self) {
        self.progress_thread
            .take_if(|(progress_thread, _)| progress_thread.strong_count() == 0);
    }

    /// Returns the progress thread, if it is alive.
    pub fn progress_thread(&self) -> Option<Arc<ProgressThread>> {
        self.progress_thread
            .as_ref()
            .and_then(|(progress_thread, _)| progress_thread.upgrade())
    }

    /// Returns whether any operation is in flight.
    pub fn is_busy(&self) -> bool {
        !self.operations.is_empty()
    }

    /// Makes progress from a call, where no progress thread does it.
    pub(super) fn progress_unless_threaded(&mut self) {
        if self.progress_thread.is_none() {
            self.progress();
        }
    }

    /// Makes progress for a caller that waits for operation `id`: on everything, or on that
    /// operation alone where a progress thread drives the rest. Returns whether anything moved.
    pub fn progress_for(&mut self, id: u64) -> bool {
        match self.progress_thread {
            None => self.progress(),
            Some(_) => self.one_message(|operation| operation == id),
        }
    }

    /// Moves the oldest operation that can move by one message. Returns whether one did.
    pub fn nudge(&mut self) -> bool {
        self.one_message(|_| true)
    }

    /// Moves one of the wanted operations by one message.
    fn one_message(&mut self, wanted: impl Fn(u64) -> bool) -> bool {
        if self.failure.is_some() {
            return false;
        }
        match self.drive_some(wanted, true) {
            Ok(false) => self.someone_left(),
            Ok(true) => true,
            Err(OpError { id, error }) => {
                self.fail(id, error);
                true
            }
        }
    }
}
