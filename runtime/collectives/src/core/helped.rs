//! Who drives what is under way: calls alone, or a helper beside them.

use super::Core;
use crate::helper::{Bell, Helper};
use std::sync::{Arc, Weak};

impl Core {
    /// From now on a helper makes operations go on.
    pub fn helped(&mut self, helper: Weak<Helper>, bell: Arc<Bell>) {
        self.helper = Some((helper, bell));
    }

    /// There is no helper any more, unless a new one has come meanwhile.
    pub fn forget_helper(&mut self) {
        self.helper
            .take_if(|(helper, _)| helper.strong_count() == 0);
    }

    /// The helper, if it lives.
    pub fn helper(&self) -> Option<Arc<Helper>> {
        self.helper
            .as_ref()
            .and_then(|(helper, _)| helper.upgrade())
    }

    /// Whether anything is under way.
    pub fn is_busy(&self) -> bool {
        !self.operations.is_empty()
    }

    /// Does what can be done in calls where nothing else does it.
    pub(super) fn progress_unless_helped(&mut self) {
        if self.helper.is_none() {
            self.progress();
        }
    }

    /// What a caller does who waits for one operation: all that can be done, or only its own
    /// part where a helper does the rest. Whether anything was done.
    pub fn progress_for(&mut self, id: u64) -> bool {
        match self.helper {
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
