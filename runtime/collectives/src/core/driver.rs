//! Who drives what is in flight: calls alone, or a progress thread overlapped them.

use super::Core;
use crate::progress_thread::{Bell, ProgressThread};
use std::sync::{Arc, Weak};

impl Core {
    /// From now on a progress thread makes operations go on.
    pub fn drive_by(&mut self, progress_thread: Weak<ProgressThread>, bell: Arc<Bell>) {
        self.progress_thread = Some((progress_thread, bell));
    }

    /// There is no progress thread any more, unless a new one has come meanwhile.
    pub fn forget_progress_thread(&mut self) {
        self.progress_thread
            .take_if(|(progress_thread, _)| progress_thread.strong_count() == 0);
    }

    /// The progress thread, if it lives.
    pub fn progress_thread(&self) -> Option<Arc<ProgressThread>> {
        self.progress_thread
            .as_ref()
            .and_then(|(progress_thread, _)| progress_thread.upgrade())
    }

    /// Whether anything is in flight.
    pub fn is_busy(&self) -> bool {
        !self.operations.is_empty()
    }

    /// Does what can be done in calls where nothing else does it.
    pub(super) fn progress_unless_threaded(&mut self) {
        if self.progress_thread.is_none() {
            self.progress();
        }
    }

    /// What a caller does who waits for one operation: all that can be done, or only its own
    /// part where a progress thread does the rest. Whether anything was done.
    pub fn progress_for(&mut self, id: u64) -> bool {
        match self.progress_thread {
            None => self.progress(),
            Some(_) => self.one_message(|operation| operation == id),
        }
    }

    /// Does the next thing that can be done, of the operation that was begun first; whether
    /// there was any.
    pub fn nudge(&mut self) -> bool {
        self.one_message(|_| true)
    }

    /// One part of an operation, of those wanted.
    fn one_message(&mut self, wanted: impl Fn(u64) -> bool) -> bool {
        if self.failure.is_some() {
            return false;
        }
        match self.drive_some(wanted, true) {
            Ok(false) => self.someone_left(),
            Ok(true) => true,
            Err((id, error)) => {
                self.fail(id, error);
                true
            }
        }
    }
}
