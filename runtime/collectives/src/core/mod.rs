//! The progress engine of a rank: every operation in flight, of all groups, over one transport.

mod driver;
mod failure;
mod in_flight;
mod shared;
mod thread;

pub(crate) use in_flight::handle;
pub(crate) use shared::Shared;
pub(crate) use thread::start_progress_thread;

use crate::eager::{
    Difference, EagerMessage, INLINE_BYTES, MessageBody, MessageKey, OpKind, PartSizes, Signature,
};
use crate::error::ErrorSite;
use crate::handle::Outcome;
use crate::operation::{Advance, Bundle, Incoming, Operation};
use crate::progress_thread::{Bell, ProgressThread};
use crate::transport::{MemoryRange, Transport, TransportError};
use crate::{CollectiveError, InvalidReason, SetupError};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// The operations of a rank, of all groups. Whoever calls it drives all of them.
pub(crate) struct Core {
    transport: Box<dyn Transport>,
    operations: BTreeMap<u64, Operation>,
    /// The results, each with the time at which it came.
    outcomes: HashMap<u64, Ended>,
    /// Announcements that arrived before any operation asked for them.
    arrived: HashMap<MessageKey, (Signature, PartSizes, MessageBody)>,
    /// The last operation that each rank announced in each group.
    heard: HashMap<(u64, usize), (u64, OpKind)>,
    /// The number of operations started in each group.
    started: HashMap<u64, u64>,
    /// The next rendezvous tag for each rank.
    tags: Vec<u32>,
    next_id: u64,
    failure: Option<CollectiveError>,
    /// A thread that makes progress between calls.
    progress_thread: Option<(Weak<ProgressThread>, Arc<Bell>)>,
}

impl Core {
    pub fn new(transport: Box<dyn Transport>) -> Core {
        let tags = vec![0; transport.size()];
        Core {
            transport,
            operations: BTreeMap::new(),
            outcomes: HashMap::new(),
            arrived: HashMap::new(),
            heard: HashMap::new(),
            started: HashMap::new(),
            tags,
            next_id: 0,
            failure: None,
            progress_thread: None,
        }
    }

    pub fn transport(&mut self) -> &mut dyn Transport {
        &mut *self.transport
    }

    /// Fails with the earlier failure, as the error of a new operation.
    pub fn usable(&self, operation: &str) -> Result<(), CollectiveError> {
        match &self.failure {
            None => Ok(()),
            Some(failure) => Err(CollectiveError::Failed {
                operation: operation.to_string(),
                cause: Box::new(failure.clone()),
            }),
        }
    }

    /// Returns the earlier failure.
    pub fn failure(&self) -> Option<&CollectiveError> {
        self.failure.as_ref()
    }

    /// Starts an operation and returns its number.
    pub fn start(&mut self, mut operation: Operation) -> Result<u64, CollectiveError> {
        self.progress_unless_threaded();
        self.usable(operation.signature.kind.name())?;
        let (context, sequence) = (operation.group.context, operation.sequence);
        self.started.insert(context, sequence + 1);
        let id = self.next_id;
        self.next_id += 1;
        let begun = self
            .early_mismatch(&operation)
            .and_then(|()| self.step(&mut operation));
        self.settle(id, operation, begun);
        self.progress_unless_threaded();
        if let Some((_, bell)) = &self.progress_thread {
            bell.ring();
        }
        Ok(id)
    }

    /// Returns the name of an unfinished operation.
    pub fn in_flight(&self) -> Option<String> {
        let first = self.operations.values().next();
        first.map(|operation| operation.at().to_string())
    }

    /// Returns whether operations are in flight and nobody waits for any of them.
    pub fn abandoned_only(&self) -> bool {
        let mut operations = self.operations.values();
        !self.operations.is_empty() && operations.all(|operation| operation.abandoned)
    }

    /// Closes the transport; no rank has anything in flight. If another thread has begun an
    /// operation in a split-off group meanwhile, this call and that operation both fail.
    pub fn close(&mut self) -> Result<(), CollectiveError> {
        self.usable("finish")?;
        if let Some(busy) = self.in_flight() {
            let error = CollectiveError::Invalid {
                operation: "finish".to_string(),
                reason: InvalidReason::InFlight {
                    operation: busy,
                    meanwhile: true,
                },
            };
            self.fail(None, error.clone());
            return Err(error);
        }
        self.failure = Some(CollectiveError::setup(SetupError::Finished));
        self.transport.close().map_err(CollectiveError::setup)
    }

    /// Pretends that something failed before the operations in flight began.
    #[cfg(test)]
    pub fn fail_before(&mut self, error: CollectiveError) {
        self.failure = Some(error);
    }

    /// Removes and returns the outcome, if there is one.
    pub fn take(&mut self, id: u64) -> Option<Ended> {
        self.outcomes.remove(&id)
    }

    /// Marks an operation whose result nobody will ask for.
    pub fn abandon(&mut self, id: u64) {
        self.outcomes.remove(&id);
        if let Some(operation) = self.operations.get_mut(&id) {
            operation.abandoned = true;
        }
    }

    /// Makes all the progress that is possible now. Returns whether anything moved.
    pub fn progress(&mut self) -> bool {
        let mut anything = false;
        while self.failure.is_none() {
            match self.round() {
                Ok(true) => anything = true,
                Ok(false) if !self.someone_left() => break,
                Ok(false) => anything = true,
                Err(OpError { id, error }) => self.fail(id, error),
            }
        }
        anything
    }

    fn round(&mut self) -> Result<bool, OpError> {
        self.drive_some(|_| true, false)
    }

    /// Receives eager messages, then drives the wanted operations: all of them, or until one
    /// moves if `first` is set. Returns whether anything moved.
    fn drive_some(&mut self, wanted: impl Fn(u64) -> bool, first: bool) -> Result<bool, OpError> {
        // Eager messages come first: a failure notice must end operations before they wait for a
        // rank that has given up.
        let mut changed = false;
        while let Some(message) = self
            .transport
            .receive_eager()
            .map_err(|reason| OpError::of_all(self.transport_error(self.nowhere(), reason)))?
        {
            changed = true;
            self.arrive(&message)?;
        }
        // By number instead of by a list, since a rank that waits comes here again and again.
        let mut from = 0;
        while let Some(id) = self.first_wanted(from, &wanted) {
            from = id + 1;
            // The operation leaves the map while it is driven, because driving borrows the rest
            // of the core. `settle` puts it back unless it has ended.
            if let Some(mut operation) = self.operations.remove(&id) {
                let moved = self.drive(&mut operation);
                // A failure counts as progress, so that callers look at outcomes again.
                let moves = *moved.as_ref().unwrap_or(&true);
                changed |= moves;
                self.settle(id, operation, moved.map(|_| ()));
                if moves && first {
                    return Ok(true);
                }
            }
            if self.failure.is_some() {
                return Ok(true);
            }
        }
        Ok(changed)
    }

    /// Returns the first of the wanted operations from a number on.
    fn first_wanted(&self, from: u64, wanted: impl Fn(u64) -> bool) -> Option<u64> {
        let ids = self.operations.range(from..).map(|(id, _)| *id);
        ids.into_iter().find(|id| wanted(*id))
    }

    /// Keeps, finishes or fails an operation after a step of it.
    fn settle(&mut self, id: u64, mut operation: Operation, done: Result<(), CollectiveError>) {
        let finished = operation.receiving.is_empty()
            && operation.sending.is_empty()
            && operation.phase == FINISHED;
        let done = match done {
            Ok(()) if !finished => {
                self.operations.insert(id, operation);
                return;
            }
            // Check for surplus messages before outputs are written back: an operation that
            // another rank saw differently must not look successful.
            Ok(()) => self.leftover(&operation).and_then(|()| operation.finish()),
            Err(error) => Err(error),
        };
        match done {
            // Nobody will ever take the outcome, so keeping it would leak it.
            Ok(()) if operation.abandoned => {}
            Ok(()) => {
                let outcome = Ok(operation.into_outputs());
                let at = Instant::now();
                self.outcomes.insert(id, Ended { outcome, at });
            }
            Err(error) => {
                self.operations.insert(id, operation);
                self.fail(Some(id), error);
            }
        }
    }

    /// Receives what has arrived for an operation, and starts its next step when the exchange is
    /// complete.
    fn drive(&mut self, operation: &mut Operation) -> Result<bool, CollectiveError> {
        let before = operation.sending.len() + operation.receiving.len();
        self.receive(operation)?;
        let mut failed = None;
        // A failed send stays in the list: its buffer is the transport's until the operation ends,
        // and the operation is ended by the error below.
        operation.sending.retain(|(_, request)| {
            let sent = self.transport.finished(*request);
            sent.map(|sent| !sent).unwrap_or_else(|reason| {
                failed = Some(reason);
                true
            })
        });
        if let Some(reason) = failed {
            return Err(self.transport_error(operation.at(), reason));
        }
        if operation.sending.is_empty() && operation.receiving.is_empty() {
            self.step(operation)?;
            return Ok(true);
        }
        Ok(before != operation.sending.len() + operation.receiving.len())
    }

    fn receive(&mut self, operation: &mut Operation) -> Result<(), CollectiveError> {
        let mut receiving = std::mem::take(&mut operation.receiving);
        let mut failed = None;
        receiving.retain_mut(|incoming| {
            // Behind a failure nothing is received any more.
            let received = failed.is_none().then(|| self.received(operation, incoming));
            match received.transpose() {
                Ok(received) => received != Some(true),
                Err(error) => {
                    failed = Some(error);
                    true
                }
            }
        });
        if let Some(error) = failed {
            return Err(error);
        }
        operation.receiving = receiving;
        Ok(())
    }

    /// Returns whether the whole bundle has arrived.
    fn received(
        &mut self,
        operation: &Operation,
        incoming: &mut Incoming,
    ) -> Result<bool, CollectiveError> {
        let Incoming { bundle, rendezvous } = incoming;
        let request = match *rendezvous {
            Some(request) => request,
            None => match self.arrived.remove(&operation.key(bundle.peer)) {
                // Without an announcement the peer may simply be late, or it may never send.
                None => return self.check_order(operation, bundle.peer).map(|()| false),
                Some((_, sizes, body)) => {
                    // Signatures were compared on arrival; sizes can only be compared here, where
                    // the receiving bundle is known.
                    compare_sizes(operation, bundle, &sizes)?;
                    let tag = match body {
                        MessageBody::Inline(data) => {
                            spread(&data, &bundle.parts);
                            return Ok(true);
                        }
                        MessageBody::Rendezvous { tag } => tag,
                    };
                    // SAFETY: the operation owns the memory and outlives the transfer; see `end`.
                    let begun = unsafe { self.transport.receive(bundle.peer, tag, &bundle.parts) };
                    let at = || operation.at();
                    *rendezvous.insert(begun.map_err(|reason| self.transport_error(at(), reason))?)
                }
            },
        };
        let finished = self.transport.finished(request);
        finished.map_err(|reason| self.transport_error(operation.at(), reason))
    }

    /// Detects a rank that skipped this operation. An operation posts its first messages when it
    /// starts; so if `from` has announced a later operation, it called something else here and
    /// will never send.
    fn check_order(&self, operation: &Operation, from: usize) -> Result<(), CollectiveError> {
        let heard = self.heard.get(&(operation.group.context, from));
        let Some((sequence, kind)) = heard else {
            return Ok(());
        };
        // A later phase proves nothing: the peer may have finished this operation before this
        // rank needed its messages, and those are still on their way in the sender's order.
        if operation.phase > 0 || *sequence <= operation.sequence {
            return Ok(());
        }
        Err(CollectiveError::Mismatch {
            at: operation.at(),
            peer: from,
            what: "what this rank is to get",
            ours: "a message".to_string(),
            theirs: format!("none, it is at operation {sequence} `{}`", kind.name()),
        })
    }

    /// Begins the next exchange, or finishes.
    fn step(&mut self, operation: &mut Operation) -> Result<(), CollectiveError> {
        match operation.advance()? {
            Advance::Finished => operation.phase = FINISHED,
            Advance::Exchange(messages, copies) => {
                // Messages leave before the copies run, so that the copies overlap the transfers.
                for message in messages {
                    self.send(operation, &message)
                        .map_err(|reason| self.transport_error(operation.at(), reason))?;
                }
                operation.copy(&copies)?;
            }
        }
        Ok(())
    }

    fn send(&mut self, operation: &mut Operation, bundle: &Bundle) -> Result<(), TransportError> {
        let inline = bundle.sizes.bytes <= INLINE_BYTES as u64;
        let tag = self.tags[bundle.peer];
        let body = if inline {
            MessageBody::Inline(gathered(&bundle.parts))
        } else {
            // Tags wrap around. That is safe because two ranks never have as many messages in
            // flight as there are tags.
            self.tags[bundle.peer] = if tag == self.transport.last_tag() {
                0
            } else {
                tag + 1
            };
            MessageBody::Rendezvous { tag }
        };
        let message = EagerMessage::Message {
            key: operation.key(self.transport.rank()),
            signature: operation.signature.clone(),
            sizes: bundle.sizes,
            body,
        };
        // The announcement leaves before the rendezvous, because the receiver only posts its
        // buffer once it has compared the announcement.
        self.transport.send_eager(bundle.peer, &message.encode())?;
        if !inline {
            // SAFETY: the operation owns the memory and outlives the transfer; see `end`.
            let begun = unsafe { self.transport.send(bundle.peer, tag, &bundle.parts) };
            operation.sending.push((bundle.peer, begun?));
        }
        Ok(())
    }

    fn arrive(&mut self, bytes: &[u8]) -> Result<(), OpError> {
        match EagerMessage::decode(bytes) {
            Some(EagerMessage::Message {
                key,
                signature,
                sizes,
                body,
            }) => self.message_arrived(key, signature, sizes, body),
            Some(EagerMessage::Failure { from, reason }) => {
                Err(OpError::of_all(CollectiveError::Peer {
                    at: self.nowhere(),
                    peer: from as usize,
                    cause: format!("gave up: {reason}"),
                }))
            }
            None => {
                let error = self.transport_error(self.nowhere(), TransportError::Unreadable);
                Err(OpError::of_all(error))
            }
        }
    }

    fn message_arrived(
        &mut self,
        key: MessageKey,
        signature: Signature,
        sizes: PartSizes,
        body: MessageBody,
    ) -> Result<(), OpError> {
        let heard = self
            .heard
            .entry((key.context, key.from as usize))
            .or_insert((key.sequence, signature.kind));
        // Phases of one operation may arrive out of order across operations, so keep the latest.
        if heard.0 <= key.sequence {
            *heard = (key.sequence, signature.kind);
        }
        let running = self.operations.iter().find(|(_, operation)| {
            operation.group.context == key.context && operation.sequence == key.sequence
        });
        match running {
            Some((id, operation)) => {
                compare(operation, key.from as usize, &signature).map_err(|error| OpError {
                    id: Some(*id),
                    error,
                })?;
            }
            // This operation has already ended here, so the message can never be received.
            None if self.started.get(&key.context) > Some(&key.sequence) => {
                return Err(OpError::of_all(self.surplus(&key, &signature)));
            }
            None => {}
        }
        self.arrived.insert(key, (signature, sizes, body));
        Ok(())
    }

    /// Compares announcements that arrived before this rank called the operation.
    fn early_mismatch(&self, operation: &Operation) -> Result<(), CollectiveError> {
        let same = |key: &MessageKey| {
            key.context == operation.group.context && key.sequence == operation.sequence
        };
        let mut early = self.arrived.iter().filter(|(key, _)| same(key));
        early
            .try_for_each(|(key, (signature, ..))| compare(operation, key.from as usize, signature))
    }

    /// Fails if a rank announced a message that this operation did not receive.
    fn leftover(&self, operation: &Operation) -> Result<(), CollectiveError> {
        let left = self.arrived.iter().find(|(key, _)| {
            key.context == operation.group.context && key.sequence == operation.sequence
        });
        match left {
            None => Ok(()),
            Some((key, (signature, ..))) => Err(self.surplus(key, signature)),
        }
    }

    fn surplus(&self, key: &MessageKey, signature: &Signature) -> CollectiveError {
        CollectiveError::Mismatch {
            at: Box::new(ErrorSite {
                operation: signature.kind.name(),
                sequence: key.sequence,
                label: signature.label.clone(),
                ..*self.nowhere()
            }),
            peer: key.from as usize,
            what: "the number of messages",
            ours: "no more are received".to_string(),
            theirs: "one more is sent".to_string(),
        }
    }
}

/// An error, and the operation that it belongs to; `None` where it ends all of them.
pub(crate) struct OpError {
    pub id: Option<u64>,
    pub error: CollectiveError,
}

impl OpError {
    fn of_all(error: CollectiveError) -> OpError {
        OpError { id: None, error }
    }
}

/// The outcome of an operation, and when it ended.
pub(crate) struct Ended {
    pub outcome: Outcome,
    pub at: Instant,
}

/// The phase of an operation that has no step left.
const FINISHED: u32 = u32::MAX;

fn compare(operation: &Operation, from: usize, theirs: &Signature) -> Result<(), CollectiveError> {
    match operation.signature.difference(theirs) {
        None => Ok(()),
        Some(Difference { what, ours, theirs }) => Err(CollectiveError::Mismatch {
            at: operation.at(),
            peer: from,
            what,
            ours,
            theirs,
        }),
    }
}

fn compare_sizes(
    operation: &Operation,
    ours: &Bundle,
    theirs: &PartSizes,
) -> Result<(), CollectiveError> {
    match ours.sizes.difference(theirs) {
        None => Ok(()),
        Some(Difference {
            what,
            ours: here,
            theirs: there,
        }) => Err(CollectiveError::Mismatch {
            at: operation.at(),
            peer: ours.peer,
            what,
            ours: here,
            theirs: there,
        }),
    }
}

/// Concatenates the parts of an operation.
fn gathered(parts: &[MemoryRange]) -> Vec<u8> {
    let mut data = Vec::with_capacity(MemoryRange::total(parts));
    for part in parts {
        // SAFETY: the operation keeps `part.bytes` bytes at this address.
        data.extend_from_slice(unsafe { std::slice::from_raw_parts(part.address, part.bytes) });
    }
    data
}

/// Distributes `data` over parts of an operation.
fn spread(data: &[u8], parts: &[MemoryRange]) {
    let mut data = data;
    for part in parts {
        let (own, rest) = data.split_at(part.bytes);
        // SAFETY: the operation keeps `part.bytes` bytes at this address.
        unsafe { std::ptr::copy(own.as_ptr(), part.address, own.len()) };
        data = rest;
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.panicked();
        }
        if self.operations.is_empty() {
            return;
        }
        let released = self.transport.revoke();
        for (_, operation) in std::mem::take(&mut self.operations) {
            failure::end(operation, released);
        }
    }
}
