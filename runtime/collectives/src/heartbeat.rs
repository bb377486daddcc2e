//! Heartbeats for work between operations, which may take minutes on one rank and no time on
//! another.

use crate::eager::OpKind;
use crate::error::ErrorSite;
use crate::{Call, CollectiveError, Collectives, SetupError};
use std::fmt::Display;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The longest time between two heartbeats: short enough to find a dead rank, long enough that
/// thousands of ranks can afford a message to every other rank.
const LONGEST: Duration = Duration::from_secs(5);
/// The largest part of a rank's reason that is sent, in bytes.
const REASON: usize = 1 << 10;

/// Runs `work` on this rank while the other ranks run theirs, and returns when all are done.
///
/// One rank may have its kernels in the cache while another compiles them for minutes. Here a
/// deadline limits how long a rank is silent, not how long it works: while `work` runs, a second
/// thread reports several times per deadline that this rank is alive. All ranks call it, in the
/// order of the group's operations, and `work` must not use the group.
///
/// # Errors
/// The error of `work` on the ranks where it failed; [`CollectiveError::Peer`] with that error's
/// text on the others; the errors of [`Collectives::gather_numbers`] when a rank falls silent.
pub fn with_heartbeat<T, E: From<CollectiveError> + Display>(
    group: &mut dyn Collectives,
    call: &Call,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    if group.size() == 1 {
        return work();
    }
    let progress = Progress::default();
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("heartbeat".to_string());
        let beats = thread.spawn_scoped(scope, || beat(group, call, &progress));
        let beats = beats.map_err(|error| {
            CollectiveError::setup(SetupError::Thread {
                purpose: "send heartbeats",
                source: error.into(),
            })
        })?;
        let ending = Ending(&progress);
        // The work runs on the caller's thread, because devices and captured state may be bound
        // to it.
        let result = work();
        ending.report(result.as_ref().err());
        let others = match beats.join() {
            Ok(others) => others,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        let value = result?;
        others?;
        Ok(value)
    })
}

/// The state of a rank's work, as sent to the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Working = 0,
    Done = 1,
    Failed = 2,
}

/// The progress of this rank's work, shared by its two threads.
#[derive(Default)]
struct Progress {
    report: Mutex<Report>,
    changed: Condvar,
}

#[derive(Default)]
struct Report {
    state: State,
    /// The reason of a failure.
    reason: String,
}

impl Progress {
    fn report(&self) -> MutexGuard<'_, Report> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the work has ended, at most for `pause`, and returns its state.
    fn wait(&self, pause: Duration) -> State {
        let until = Instant::now() + pause;
        let mut report = self.report();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if report.state != State::Working || left.is_zero() {
                return report.state;
            }
            let woken = self.changed.wait_timeout(report, left);
            report = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn end(&self, state: State, reason: String) {
        *self.report() = Report { state, reason };
        self.changed.notify_all();
    }
}

/// A guard that reports the end of the work even after a panic. Without it the heartbeat thread
/// would run forever, because a scope joins its threads.
struct Ending<'a>(&'a Progress);

impl Ending<'_> {
    fn report(self, error: Option<&impl Display>) {
        match error {
            None => self.0.end(State::Done, String::new()),
            Some(error) => self.0.end(State::Failed, error.to_string()),
        }
    }
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if self.0.report().state == State::Working {
            self.0.end(State::Failed, "it has panicked".to_string());
        }
    }
}

/// Sends heartbeats until no rank is working.
fn beat(
    group: &mut dyn Collectives,
    call: &Call,
    progress: &Progress,
) -> Result<(), CollectiveError> {
    // Four per deadline, because a busy machine may delay two of them.
    let pause = call.deadline.unwrap_or_else(|| group.deadline()) / 4;
    let pause = pause.min(LONGEST);
    loop {
        let own = progress.wait(pause);
        let states = group.gather_numbers(&[own as u64], call)?;
        let any = |state: State| {
            states
                .iter()
                .any(|all| all.first() == Some(&(state as u64)))
        };
        // Failures come before completion: all ranks saw the same states, so all of them leave
        // the loop here together.
        if any(State::Failed) {
            return Err(why(group, call, progress)?);
        }
        if !any(State::Working) {
            return Ok(());
        }
    }
}

/// Returns the failure of the lowest rank that has one. All ranks gather the reasons, so all
/// report the same rank.
fn why(
    group: &mut dyn Collectives,
    call: &Call,
    progress: &Progress,
) -> Result<CollectiveError, CollectiveError> {
    let sequence = group.sequence();
    let own = {
        let report = progress.report();
        let mut end = report.reason.len().min(REASON);
        // Never cut a multi-byte character in half.
        while !report.reason.is_char_boundary(end) {
            end -= 1;
        }
        report.reason[..end].to_string()
    };
    let reasons = group.gather_bytes(own.as_bytes(), call)?;
    let failed = reasons.iter().position(|reason| !reason.is_empty());
    let failed = failed.unwrap_or_default();
    Ok(CollectiveError::Peer {
        at: Box::new(ErrorSite {
            operation: OpKind::Agree.name(),
            sequence,
            label: call.label.clone(),
            phase: "heartbeat",
            rank: group.members()[group.rank()],
        }),
        peer: group.members()[failed],
        cause: format!("failed: {}", String::from_utf8_lossy(&reasons[failed])),
    })
}
