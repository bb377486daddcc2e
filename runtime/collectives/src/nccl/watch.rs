//! The operations in flight on the device, and their end when one takes too long.
//!
//! Three threads share the work, so that none can block the others. The *prober* polls the driver
//! and the library, and a stuck driver may block it. The *watchdog* reads only the clock and
//! calls neither. After a failure, the *undertaker* aborts the communicators, and nobody waits
//! for it for long.

use super::comm::Comm;
use crate::core::OpError;
use crate::error::{ErrorSite, Missing};
use crate::operation::Group;
use crate::{CollectiveError, SetupError, Slice};
use moesaic_target::Event;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The time between two polls of the prober.
const GLANCE: Duration = Duration::from_millis(2);
/// The time that the watchdog grants the prober past a deadline.
const LAST_LOOK: Duration = Duration::from_secs(2);
/// The grace past the deadline. It exceeds the grace of the ranks' own comparison, whose errors
/// say more.
const SLACK: Duration = Duration::from_millis(300);

/// An operation on the device.
pub struct DeviceOperation {
    pub at: Box<ErrorSite>,
    pub group: Arc<Group>,
    pub comm: Arc<Comm>,
    pub started: Instant,
    pub deadline: Duration,
    /// The event behind the operation; `None` while it is being launched.
    pub event: Option<Arc<dyn Event>>,
    /// The memory that the device may be using.
    pub keep: Vec<Slice>,
    /// Whether all ranks have called it.
    pub agreed: bool,
    pub done: bool,
    /// Whether the caller has dropped the handle.
    pub abandoned: bool,
}

#[derive(Default)]
struct State {
    work: BTreeMap<u64, DeviceOperation>,
    comms: Vec<Arc<Comm>>,
    next: u64,
    /// The number of finished polls of the prober.
    looks: u64,
    failure: Option<CollectiveError>,
    /// The operation that failed first.
    culprit: Option<u64>,
    /// Whether the undertaker has finished.
    buried: bool,
    closed: bool,
}

/// The operations of a rank. Its lock is never held during a call of the driver or the library,
/// because such a call may never return.
#[derive(Default)]
pub struct Board {
    state: Mutex<State>,
    changed: Condvar,
}

/// The progress of an operation.
pub enum Standing {
    /// In flight, with the event it waits for.
    Running(Option<Arc<dyn Event>>),
    Done,
    Failed(CollectiveError),
}

impl Board {
    /// Returns a board with its threads, which end when it is closed.
    pub fn new() -> Result<Arc<Board>, CollectiveError> {
        let board = Arc::new(Board::default());
        board.spawn("nccl prober", Board::probe)?;
        board.spawn("nccl watchdog", Board::guard)?;
        Ok(board)
    }

    fn spawn(self: &Arc<Self>, name: &str, body: fn(&Board)) -> Result<(), CollectiveError> {
        let own = Arc::clone(self);
        let builder = std::thread::Builder::new().name(name.to_string());
        let spawned = builder.spawn(move || body(&own));
        let purpose = "watch over the operations of the GPU";
        let refused = |error: std::io::Error| {
            let source = error.into();
            CollectiveError::setup(SetupError::Thread { purpose, source })
        };
        spawned.map(|_| ()).map_err(refused)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn add_comm(&self, comm: &Arc<Comm>) {
        self.lock().comms.push(Arc::clone(comm));
    }

    /// Returns all communicators, groups before the communicator they were split off.
    pub fn comms(&self) -> Vec<Arc<Comm>> {
        self.lock().comms.iter().rev().cloned().collect()
    }

    pub fn failure(&self) -> Option<CollectiveError> {
        self.lock().failure.clone()
    }

    /// Fails with the earlier failure, as the error of a new operation.
    pub fn usable(&self, operation: &str) -> Result<(), CollectiveError> {
        match self.failure() {
            None => Ok(()),
            Some(failure) => Err(CollectiveError::Failed {
                operation: operation.to_string(),
                cause: Box::new(failure),
            }),
        }
    }

    pub fn begin(&self, work: DeviceOperation) -> u64 {
        let mut state = self.lock();
        let id = state.next;
        state.next += 1;
        state.work.insert(id, work);
        self.changed.notify_all();
        id
    }

    /// Records that an operation is on the stream; the event is `None` where nothing runs, as
    /// during graph capture.
    pub fn launched(&self, id: u64, event: Option<Arc<dyn Event>>) {
        if let Some(work) = self.lock().work.get_mut(&id) {
            // Without an event nothing runs, so there is nothing to wait for.
            work.done = event.is_none();
            work.event = event;
        }
        self.changed.notify_all();
    }

    pub fn standing(&self, id: u64) -> Standing {
        let state = self.lock();
        match (state.work.get(&id), &state.failure) {
            // An operation that had ended before the failure stays successful.
            (Some(work), _) if work.done => Standing::Done,
            (work, Some(failure)) => Standing::Failed(match (work, state.culprit == Some(id)) {
                (Some(work), false) => at_work(failure, work),
                _ => failure.clone(),
            }),
            (Some(work), None) => Standing::Running(work.event.clone()),
            // Only finished operations are forgotten.
            (None, None) => Standing::Done,
        }
    }

    pub fn done(&self, id: u64) {
        if let Some(work) = self.lock().work.get_mut(&id) {
            work.done = true;
        }
    }

    /// Records that all ranks have called an operation.
    pub fn agreed(&self, id: u64) {
        if let Some(work) = self.lock().work.get_mut(&id) {
            work.agreed = true;
        }
    }

    /// Forgets an operation: now if it is over, else when it is.
    pub fn leave(&self, id: u64) {
        let mut state = self.lock();
        let kept = state.failure.is_some() && !state.buried;
        match state.work.get_mut(&id) {
            Some(work) if work.done && !kept => drop(state.work.remove(&id)),
            Some(work) => work.abandoned = true,
            None => {}
        }
    }

    /// Returns the name of an unfinished operation.
    pub fn in_flight(&self) -> Option<String> {
        let state = self.lock();
        let running = state.work.values().find(|work| !work.done);
        running.map(|work| work.at.to_string())
    }

    /// Returns whether operations are in flight and nobody waits for any of them.
    pub fn abandoned_only(&self) -> bool {
        let state = self.lock();
        let mut running = state.work.values().filter(|work| !work.done).peekable();
        running.peek().is_some() && running.all(|work| work.abandoned)
    }

    /// Fails everything; only the first failure counts. `culprit` is the operation that failed.
    pub fn fail(&self, culprit: Option<u64>, error: CollectiveError) {
        let mut state = self.lock();
        if state.failure.is_none() {
            state.failure = Some(error);
            state.culprit = culprit;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends the threads; later calls fail with `why`.
    pub fn close(&self, why: Option<CollectiveError>) {
        let mut state = self.lock();
        if state.failure.is_none() {
            state.failure = why;
        }
        state.closed = true;
        drop(state);
        self.changed.notify_all();
    }

    /// Returns whether the board is closed.
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Waits until the communicators have been aborted after a failure, at most for `time`;
    /// returns whether they have.
    pub fn buried_within(&self, time: Duration) -> bool {
        let state = self.lock();
        let waited = self
            .changed
            .wait_timeout_while(state, time, |state| !state.buried);
        waited.unwrap_or_else(PoisonError::into_inner).0.buried
    }

    /// Runs the prober: polls launched operations until the board is closed.
    fn probe(&self) {
        loop {
            let state = self.lock();
            if state.closed || state.failure.is_some() {
                return;
            }
            // Copy what to poll and release the lock: a stuck driver must not block the watchdog.
            let (events, comms) = running(&state);
            if events.is_empty() && comms.is_empty() {
                drop(self.changed.wait(state));
                continue;
            }
            drop(state);
            let found = self.look(events, &comms);
            let mut state = self.lock();
            state.looks += 1;
            state.work.retain(|_, work| !(work.done && work.abandoned));
            drop(state);
            if let Err(OpError { id, error }) = found {
                return self.fail(id, error);
            }
            self.changed.notify_all();
            std::thread::sleep(GLANCE);
        }
    }

    fn look(
        &self,
        events: Vec<(u64, Arc<dyn Event>)>,
        comms: &[(u64, Arc<Comm>)],
    ) -> Result<(), OpError> {
        // Library errors come first, because their text says more than the event of the kernel
        // they stopped.
        for (id, comm) in comms {
            let state = comm.enter().map(|entered| entered.state());
            if let Some(Err(reason)) = state {
                let error = self.at(*id, |at| CollectiveError::Transport {
                    at,
                    transport: comm.api.name(),
                    reason,
                });
                // An operation that was forgotten meanwhile has no one to report to.
                return error.map_or(Ok(()), |error| {
                    Err(OpError {
                        id: Some(*id),
                        error,
                    })
                });
            }
        }
        for (id, event) in events {
            match event.passed() {
                Ok(true) => self.done(id),
                // Later operations of this stream have not passed either, but operations of
                // another stream may have.
                Ok(false) => {}
                Err(failed) => {
                    let reason = Box::new(failed);
                    let error = self.at(id, |at| CollectiveError::Device { at, reason });
                    return error.map_or(Ok(()), |error| {
                        Err(OpError {
                            id: Some(id),
                            error,
                        })
                    });
                }
            }
        }
        Ok(())
    }

    fn at(
        &self,
        id: u64,
        error: impl FnOnce(Box<ErrorSite>) -> CollectiveError,
    ) -> Option<CollectiveError> {
        let state = self.lock();
        state.work.get(&id).map(|work| error(work.at.clone()))
    }

    /// Runs the watchdog: fails operations past their deadline, and starts the undertaker after
    /// any failure.
    fn guard(&self) {
        let mut state = self.lock();
        while !state.closed {
            if state.failure.is_some() {
                let comms = state.comms.clone();
                drop(state);
                // The watchdog becomes the undertaker: after a failure no deadline matters any
                // more.
                return self.bury(comms);
            }
            let now = Instant::now();
            state = match next_expiry(&state) {
                Some((_, expiry)) if expiry > now => {
                    let waited = self.changed.wait_timeout(state, expiry - now);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                Some((id, _)) => self.expire(state, id),
                None => {
                    let waited = self.changed.wait(state);
                    waited.unwrap_or_else(PoisonError::into_inner)
                }
            };
        }
    }

    /// Grants the prober one more complete poll, because a busy machine may have delayed it.
    fn expire<'a>(&'a self, state: MutexGuard<'a, State>, id: u64) -> MutexGuard<'a, State> {
        // Two, because the poll that is in progress may have begun before the operation ended.
        let looks = state.looks + 2;
        let waited = self.changed.wait_timeout_while(state, LAST_LOOK, |state| {
            let over = state.work.get(&id).is_none_or(|work| work.done);
            !over && state.looks < looks && state.failure.is_none() && !state.closed
        });
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        // Look again: the operation may have ended during the wait.
        let work = state.work.get(&id).filter(|work| !work.done);
        if let Some(error) = work.map(deadline_error)
            && state.failure.is_none()
        {
            (state.failure, state.culprit) = (Some(error), Some(id));
            self.changed.notify_all();
        }
        state
    }

    /// Runs the undertaker. The device may use the memory of operations in flight until the
    /// library confirms the abort, so that memory is released after that, or never.
    fn bury(&self, comms: Vec<Arc<Comm>>) {
        // Groups before the communicator they were split off, which they depend on.
        for comm in comms.iter().rev() {
            comm.abort();
        }
        let mut state = self.lock();
        state.buried = true;
        for work in state.work.values_mut() {
            work.keep.clear();
        }
        drop(state);
        self.changed.notify_all();
    }
}

type Running = (Vec<(u64, Arc<dyn Event>)>, Vec<(u64, Arc<Comm>)>);

/// Returns what the prober polls: events, and each communicator once.
fn running(state: &State) -> Running {
    let running = || state.work.iter().filter(|(_, work)| !work.done);
    let event = |(id, work): (&u64, &DeviceOperation)| Some((*id, work.event.clone()?));
    let mut comms: Vec<(u64, Arc<Comm>)> = Vec::new();
    for (id, work) in running() {
        // Operations share communicators, and each query is a library call.
        if !comms.iter().any(|(_, comm)| Arc::ptr_eq(comm, &work.comm)) {
            comms.push((*id, Arc::clone(&work.comm)));
        }
    }
    (running().filter_map(event).collect(), comms)
}

fn next_expiry(state: &State) -> Option<(u64, Instant)> {
    let running = state.work.iter().filter(|(_, work)| !work.done);
    let expiry = |work: &DeviceOperation| work.started + work.deadline + SLACK;
    running
        .map(|(id, work)| (*id, expiry(work)))
        .min_by_key(|(_, expiry)| *expiry)
}

/// Returns the deadline error. The device does not show which rank is late, so the error names
/// all others.
fn deadline_error(work: &DeviceOperation) -> CollectiveError {
    let here = format!("{} `{}`", work.at.sequence, work.at.operation);
    let others = work.group.members.iter().enumerate();
    let missing = others
        .filter(|(place, _)| *place != work.group.rank)
        .map(|(_, rank)| Missing {
            rank: *rank,
            heard: work.agreed.then(|| here.clone()),
        });
    CollectiveError::Deadline {
        at: work.at.clone(),
        waited: work.started.elapsed(),
        missing: missing.collect(),
    }
}

/// Returns the same failure as an error of another operation.
fn at_work(error: &CollectiveError, work: &DeviceOperation) -> CollectiveError {
    match error {
        CollectiveError::Peer { peer, cause, .. } => CollectiveError::Peer {
            at: work.at.clone(),
            peer: *peer,
            cause: cause.clone(),
        },
        other => CollectiveError::Failed {
            operation: work.at.to_string(),
            cause: Box::new(other.clone()),
        },
    }
}
