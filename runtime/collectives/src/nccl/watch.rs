//! What is in flight on the device, and its end when it takes too long.
//!
//! Three threads share the work, so that none can hold up the end of another. The
//! *prober* asks the driver and the library how far things are; a driver that is stuck
//! holds it up. The *watchdog* knows the clock alone, and calls neither. The *undertaker*,
//! started by a failure, ends the communicators, and nobody waits for it for long.

use super::comm::Comm;
use crate::error::{At, Missing};
use crate::operation::Group;
use crate::{CollectiveError, Slice};
use moesaic_target::Event;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Between two looks of the prober.
const GLANCE: Duration = Duration::from_millis(2);
/// How long the watchdog waits, past a deadline, for the prober's last looks.
const LAST_LOOK: Duration = Duration::from_secs(2);
/// A little more than the ranks' own agreement gets, whose errors say more.
const SLACK: Duration = Duration::from_millis(300);

/// An operation on the device.
pub struct Work {
    pub at: Box<At>,
    pub group: Arc<Group>,
    pub comm: Arc<Comm>,
    pub started: Instant,
    pub deadline: Duration,
    /// Where the stream has to come; `None` while it is being launched.
    pub event: Option<Arc<dyn Event>>,
    /// What the device may be using.
    pub keep: Vec<Slice>,
    /// All ranks have called it.
    pub agreed: bool,
    pub done: bool,
    /// Nobody will ask how it ended.
    pub abandoned: bool,
}

#[derive(Default)]
struct State {
    work: BTreeMap<u64, Work>,
    comms: Vec<Arc<Comm>>,
    next: u64,
    /// Looks of the prober that are over.
    looks: u64,
    failure: Option<CollectiveError>,
    /// The operation that has failed, rather than another.
    culprit: Option<u64>,
    /// The undertaker has done all.
    buried: bool,
    closed: bool,
}

/// The operations of a rank. Its lock is never held over a call of driver or library.
#[derive(Default)]
pub struct Board {
    state: Mutex<State>,
    changed: Condvar,
}

/// How an operation stands.
pub enum Standing {
    /// The event it waits for.
    Running(Option<Arc<dyn Event>>),
    Done,
    Failed(CollectiveError),
}

impl Board {
    /// With its threads, which end when it is closed.
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
        spawned
            .map(|_| ())
            .map_err(|error| super::find::setup(error.to_string()))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn add_comm(&self, comm: &Arc<Comm>) {
        self.lock().comms.push(Arc::clone(comm));
    }

    /// All communicators; groups come before what they were split off.
    pub fn comms(&self) -> Vec<Arc<Comm>> {
        self.lock().comms.iter().rev().cloned().collect()
    }

    pub fn failure(&self) -> Option<CollectiveError> {
        self.lock().failure.clone()
    }

    /// What failed before, as an error of a new operation.
    pub fn usable(&self, operation: &str) -> Result<(), CollectiveError> {
        match self.failure() {
            None => Ok(()),
            Some(failure) => Err(CollectiveError::Failed {
                operation: operation.to_string(),
                cause: failure.to_string(),
            }),
        }
    }

    pub fn begin(&self, work: Work) -> u64 {
        let mut state = self.lock();
        let id = state.next;
        state.next += 1;
        state.work.insert(id, work);
        self.changed.notify_all();
        id
    }

    /// It is on the stream; `None` where nothing runs, as while a graph is captured.
    pub fn launched(&self, id: u64, event: Option<Arc<dyn Event>>) {
        if let Some(work) = self.lock().work.get_mut(&id) {
            work.done = event.is_none();
            work.event = event;
        }
        self.changed.notify_all();
    }

    pub fn standing(&self, id: u64) -> Standing {
        let state = self.lock();
        match (state.work.get(&id), &state.failure) {
            (Some(work), _) if work.done => Standing::Done,
            (work, Some(failure)) => Standing::Failed(match (work, state.culprit == Some(id)) {
                (Some(work), false) => at_work(failure, work),
                _ => failure.clone(),
            }),
            (Some(work), None) => Standing::Running(work.event.clone()),
            (None, None) => Standing::Done,
        }
    }

    pub fn done(&self, id: u64) {
        if let Some(work) = self.lock().work.get_mut(&id) {
            work.done = true;
        }
    }

    /// All ranks have called it.
    pub fn agreed(&self, id: u64) {
        if let Some(work) = self.lock().work.get_mut(&id) {
            work.agreed = true;
        }
    }

    /// Forgets what is over; what is not is forgotten when it is.
    pub fn leave(&self, id: u64) {
        let mut state = self.lock();
        let kept = state.failure.is_some() && !state.buried;
        match state.work.get_mut(&id) {
            Some(work) if work.done && !kept => drop(state.work.remove(&id)),
            Some(work) => work.abandoned = true,
            None => {}
        }
    }

    /// An operation that is not over.
    pub fn in_flight(&self) -> Option<String> {
        let state = self.lock();
        let running = state.work.values().find(|work| !work.done);
        running.map(|work| work.at.to_string())
    }

    /// Whether all that is in flight will be asked for by nobody.
    pub fn abandoned_only(&self) -> bool {
        let state = self.lock();
        let mut running = state.work.values().filter(|work| !work.done).peekable();
        running.peek().is_some() && running.all(|work| work.abandoned)
    }

    /// Ends everything; the first failure counts. `culprit` is the operation it is of.
    pub fn fail(&self, culprit: Option<u64>, error: CollectiveError) {
        let mut state = self.lock();
        if state.failure.is_none() {
            state.failure = Some(error);
            state.culprit = culprit;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends the threads; `why` is what later calls hear.
    pub fn close(&self, why: Option<CollectiveError>) {
        let mut state = self.lock();
        if state.failure.is_none() {
            state.failure = why;
        }
        state.closed = true;
        drop(state);
        self.changed.notify_all();
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Whether the communicators have been ended after a failure, within that time.
    pub fn buried_within(&self, time: Duration) -> bool {
        let state = self.lock();
        let waited = self
            .changed
            .wait_timeout_while(state, time, |state| !state.buried);
        waited.unwrap_or_else(PoisonError::into_inner).0.buried
    }

    /// The prober: looks at what has been launched until the board is closed.
    fn probe(&self) {
        loop {
            let state = self.lock();
            if state.closed || state.failure.is_some() {
                return;
            }
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
            if let Err((culprit, error)) = found {
                return self.fail(culprit, error);
            }
            self.changed.notify_all();
            std::thread::sleep(GLANCE);
        }
    }

    fn look(
        &self,
        events: Vec<(u64, Arc<dyn Event>)>,
        comms: &[(u64, Arc<Comm>)],
    ) -> Result<(), (Option<u64>, CollectiveError)> {
        for (id, comm) in comms {
            let state = comm.enter().map(|entered| entered.state());
            if let Some(Err(reason)) = state {
                let error = self.at(*id, |at| CollectiveError::Transport {
                    at,
                    transport: comm.api.name(),
                    reason,
                });
                return error.map_or(Ok(()), |error| Err((Some(*id), error)));
            }
        }
        for (id, event) in events {
            match event.passed() {
                Ok(true) => self.done(id),
                // Later ones of the stream have not passed either; of another they may.
                Ok(false) => {}
                Err(failed) => {
                    let reason = failed.to_string();
                    let error = self.at(id, |at| CollectiveError::Device { at, reason });
                    return error.map_or(Ok(()), |error| Err((Some(id), error)));
                }
            }
        }
        Ok(())
    }

    fn at(
        &self,
        id: u64,
        error: impl FnOnce(Box<At>) -> CollectiveError,
    ) -> Option<CollectiveError> {
        let state = self.lock();
        state.work.get(&id).map(|work| error(work.at.clone()))
    }

    /// The watchdog: ends what is past its deadline, and buries after any failure.
    fn guard(&self) {
        let mut state = self.lock();
        while !state.closed {
            if state.failure.is_some() {
                let comms = state.comms.clone();
                drop(state);
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

    /// The prober may have been held up by a busy machine: it gets one more whole look.
    fn expire<'a>(&'a self, state: MutexGuard<'a, State>, id: u64) -> MutexGuard<'a, State> {
        let looks = state.looks + 2;
        let waited = self.changed.wait_timeout_while(state, LAST_LOOK, |state| {
            let over = state.work.get(&id).is_none_or(|work| work.done);
            !over && state.looks < looks && state.failure.is_none() && !state.closed
        });
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        let work = state.work.get(&id).filter(|work| !work.done);
        if let Some(error) = work.map(deadline_error)
            && state.failure.is_none()
        {
            (state.failure, state.culprit) = (Some(error), Some(id));
            self.changed.notify_all();
        }
        state
    }

    /// The undertaker. The device may use the memory of what was in flight until the
    /// library says otherwise, so it is let go of after that, or never.
    fn bury(&self, comms: Vec<Arc<Comm>>) {
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

/// What the prober has to look at: events, and each communicator once.
fn running(state: &State) -> Running {
    let running = || state.work.iter().filter(|(_, work)| !work.done);
    let event = |(id, work): (&u64, &Work)| Some((*id, work.event.clone()?));
    let mut comms: Vec<(u64, Arc<Comm>)> = Vec::new();
    for (id, work) in running() {
        if !comms.iter().any(|(_, comm)| Arc::ptr_eq(comm, &work.comm)) {
            comms.push((*id, Arc::clone(&work.comm)));
        }
    }
    (running().filter_map(event).collect(), comms)
}

fn next_expiry(state: &State) -> Option<(u64, Instant)> {
    let running = state.work.iter().filter(|(_, work)| !work.done);
    let expiry = |work: &Work| work.started + work.deadline + SLACK;
    running
        .map(|(id, work)| (*id, expiry(work)))
        .min_by_key(|(_, expiry)| *expiry)
}

/// Who is late cannot be seen from here: all others are named.
fn deadline_error(work: &Work) -> CollectiveError {
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

/// The same failure, as that of another operation.
fn at_work(error: &CollectiveError, work: &Work) -> CollectiveError {
    match error {
        CollectiveError::Peer { peer, cause, .. } => CollectiveError::Peer {
            at: work.at.clone(),
            peer: *peer,
            cause: cause.clone(),
        },
        other => CollectiveError::Failed {
            operation: work.at.to_string(),
            cause: other.to_string(),
        },
    }
}
