//! How everything ends when one thing fails.

use super::Core;
use crate::CollectiveError;
use crate::eager::EagerMessage;
use crate::error::{At, Missing};
use crate::operation::Operation;
use std::time::{Duration, Instant};

/// How long a rank that gives up tries to tell the others.
const FAREWELL: Duration = Duration::from_millis(200);

impl Core {
    /// Ends everything if the operation is past its deadline.
    pub fn expire(&mut self, id: u64) {
        let Some(operation) = self.operations.get(&id) else {
            return;
        };
        let waited = operation.started.elapsed();
        if waited <= operation.deadline {
            return;
        }
        let context = operation.group.context;
        let missing = operation.waits_for().into_iter().map(|rank| Missing {
            rank,
            heard: self
                .heard
                .get(&(context, rank))
                .map(|(sequence, kind)| format!("{sequence} `{}`", kind.name())),
        });
        let error = CollectiveError::Deadline {
            at: operation.at(),
            waited,
            missing: missing.collect(),
        };
        self.fail(Some(id), error);
    }

    /// Ends an operation that waits for a rank that is gone; false if there is none.
    pub(super) fn someone_left(&mut self) -> bool {
        let mut found = None;
        for (id, operation) in &self.operations {
            let gone = |rank: usize| Some((rank, self.transport.gone(rank)?));
            if let Some((peer, why)) = operation.waits_for().into_iter().find_map(gone) {
                let error = CollectiveError::Peer {
                    at: operation.at(),
                    peer,
                    cause: why.to_string(),
                };
                found = Some((*id, error));
                break;
            }
        }
        let Some((id, error)) = found else {
            return false;
        };
        // What it posted before it went counts: a last look, now that it is known to be gone.
        match self.round() {
            Ok(true) => {}
            Ok(false) => self.fail(Some(id), error),
            Err((id, error)) => self.fail(id, error),
        }
        true
    }

    /// Ends everything; `error` is that of operation `culprit`. After the first failure only
    /// what another thread has begun meanwhile is left to end.
    pub(crate) fn fail(&mut self, culprit: Option<u64>, error: CollectiveError) {
        let first = self.failure.is_none();
        let gave_up =
            matches!(&error, CollectiveError::Peer { cause, .. } if cause.starts_with("gave up"));
        if first && !gave_up {
            self.tell_others(&error);
        }
        let released = self.transport.revoke();
        for (id, operation) in std::mem::take(&mut self.operations) {
            let own = match (&error, culprit == Some(id)) {
                (_, true) => error.clone(),
                (error, false) => at_operation(error, &operation),
            };
            if !operation.abandoned {
                self.outcomes.insert(id, (Err(own), Instant::now()));
            }
            end(operation, released);
        }
        self.arrived.clear();
        self.failure.get_or_insert(error);
    }

    /// The others learn at once that this rank will do nothing more.
    pub(super) fn panicked(&mut self) {
        let error = CollectiveError::Peer {
            at: self.nowhere(),
            peer: self.transport.rank(),
            cause: "has panicked".to_string(),
        };
        self.fail(None, error);
    }

    fn tell_others(&mut self, error: &CollectiveError) {
        let own = self.transport.rank();
        let message = EagerMessage::Failure {
            from: own as u32,
            reason: error.to_string(),
        };
        let message = message.encode();
        for rank in (0..self.transport.size()).filter(|rank| *rank != own) {
            // Who cannot be told finds out at its own deadline.
            let _ = self.transport.send_eager(rank, &message);
        }
        let until = Instant::now() + FAREWELL;
        while self.transport.unsent_eager() > 0 && Instant::now() < until {
            let _ = self.transport.receive_eager();
            std::thread::yield_now();
        }
    }

    pub(super) fn engine_error(&self, at: Box<At>, reason: String) -> CollectiveError {
        CollectiveError::Transport {
            at,
            transport: self.transport.name(),
            reason,
        }
    }

    /// Outside of any operation: the first one in flight, if there is one.
    pub(super) fn nowhere(&self) -> Box<At> {
        let first = self.operations.values().next().map(Operation::at);
        first.unwrap_or_else(|| At::outside(self.transport.rank()))
    }
}

/// Memory that an transport may still touch is never given back.
pub(super) fn end(operation: Operation, released: bool) {
    if !released {
        std::mem::forget(operation);
    }
}

/// The same failure, as that of another operation.
fn at_operation(error: &CollectiveError, operation: &Operation) -> CollectiveError {
    match error {
        CollectiveError::Peer { peer, cause, .. } => CollectiveError::Peer {
            at: operation.at(),
            peer: *peer,
            cause: cause.clone(),
        },
        other => CollectiveError::Failed {
            operation: operation.at().to_string(),
            cause: other.to_string(),
        },
    }
}
