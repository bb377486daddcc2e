//! Failure of a rank: the first error ends every operation in flight, on every rank.

use super::{Core, Ended, OpError};
use crate::CollectiveError;
use crate::eager::EagerMessage;
use crate::error::{ErrorSite, Missing};
use crate::operation::Operation;
use crate::transport::TransportError;
use std::time::{Duration, Instant};

/// The time for which a rank that gives up keeps trying to notify the others.
const FAREWELL: Duration = Duration::from_millis(200);

impl Core {
    /// Fails everything if the operation is past its deadline.
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

    /// Fails everything if an operation waits for a rank that is gone. Returns false if none
    /// does.
    pub(super) fn someone_left(&mut self) -> bool {
        let mut found = None;
        for (id, operation) in &self.operations {
            let gone = |rank: usize| Some((rank, self.transport.gone(rank)?));
            let gone = operation.peers().filter_map(gone);
            if let Some((peer, why)) = gone.min_by_key(|(rank, _)| *rank) {
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
        // Eager messages that the rank posted before it left still count, so poll once more now
        // that it is known to be gone.
        match self.round() {
            Ok(true) => {}
            Ok(false) => self.fail(Some(id), error),
            Err(OpError { id, error }) => self.fail(id, error),
        }
        true
    }

    /// Fails every operation in flight; `error` belongs to operation `culprit`. After the first
    /// failure, only operations that another thread began meanwhile are left to end.
    pub(crate) fn fail(&mut self, culprit: Option<u64>, error: CollectiveError) {
        // Only a rank's own first failure is sent. Forwarding the notices of others would bounce
        // them back and forth.
        let first = self.failure.is_none();
        let gave_up =
            matches!(&error, CollectiveError::Peer { cause, .. } if cause.starts_with("gave up"));
        if first && !gave_up {
            self.notify_others(&error);
        }
        let released = self.transport.revoke();
        for (id, operation) in std::mem::take(&mut self.operations) {
            let own = match (&error, culprit == Some(id)) {
                (_, true) => error.clone(),
                (error, false) => at_operation(error, &operation),
            };
            if !operation.abandoned {
                let (outcome, at) = (Err(own), Instant::now());
                self.outcomes.insert(id, Ended { outcome, at });
            }
            end(operation, released);
        }
        self.arrived.clear();
        self.failure.get_or_insert(error);
    }

    /// Notifies the other ranks that this rank has panicked and does nothing more.
    pub(super) fn panicked(&mut self) {
        let error = CollectiveError::Peer {
            at: self.nowhere(),
            peer: self.transport.rank(),
            cause: "has panicked".to_string(),
        };
        self.fail(None, error);
    }

    fn notify_others(&mut self, error: &CollectiveError) {
        let own = self.transport.rank();
        let message = EagerMessage::Failure {
            from: own as u32,
            reason: error.to_string(),
        };
        let message = message.encode();
        for rank in (0..self.transport.size()).filter(|rank| *rank != own) {
            // A rank that this message does not reach finds out at its own deadline.
            let _ = self.transport.send_eager(rank, &message);
        }
        let until = Instant::now() + FAREWELL;
        while self.transport.unsent_eager() > 0 && Instant::now() < until {
            let _ = self.transport.receive_eager();
            std::thread::yield_now();
        }
    }

    pub(super) fn transport_error(
        &self,
        at: Box<ErrorSite>,
        reason: TransportError,
    ) -> CollectiveError {
        CollectiveError::Transport {
            at,
            transport: self.transport.name(),
            reason,
        }
    }

    /// Returns the position of an error outside any operation: the oldest one in flight, if any.
    pub(super) fn nowhere(&self) -> Box<ErrorSite> {
        let first = self.operations.values().next().map(Operation::at);
        first.unwrap_or_else(|| ErrorSite::outside(self.transport.rank()))
    }
}

/// Ends an operation. Memory that the transport may still touch is leaked, never freed: MPI could
/// write into a receive buffer long after this rank has given up.
pub(super) fn end(operation: Operation, released: bool) {
    if !released {
        std::mem::forget(operation);
    }
}

/// Returns the same failure as an error of another operation.
fn at_operation(error: &CollectiveError, operation: &Operation) -> CollectiveError {
    match error {
        CollectiveError::Peer { peer, cause, .. } => CollectiveError::Peer {
            at: operation.at(),
            peer: *peer,
            cause: cause.clone(),
        },
        other => CollectiveError::Failed {
            operation: operation.at().to_string(),
            cause: Box::new(other.clone()),
        },
    }
}
