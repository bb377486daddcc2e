//! Handles of operations in flight.

use crate::CollectiveError;
use crate::memory::Region;
use std::time::{Duration, Instant};

/// The outputs of an operation, or its failure.
pub(crate) type Outcome = Result<Vec<Region>, CollectiveError>;

/// An operation in flight. Dropping the handle does not cancel it: the operation continues in
/// later calls and keeps its memory alive.
#[must_use = "an operation is finished only when `wait` has returned"]
pub struct Handle {
    work: Box<dyn InFlight>,
    operation: &'static str,
    sequence: u64,
    outcome: Option<Outcome>,
}

/// The implementation behind a handle.
pub(crate) trait InFlight: Send {
    /// Makes progress.
    fn poll(&mut self) -> Polled;

    /// Marks the operation as one that nobody asks for any more.
    fn abandon(&mut self);

    /// Returns whether the operation is in the order of the device's stream, so that later
    /// launches see its result.
    fn in_order(&self) -> bool {
        false
    }

    /// Returns whether the operation is in the order of another stream of the device.
    fn is_overlapped(&self) -> bool {
        false
    }

    /// Makes later launches on the device see the result of an overlapped operation.
    fn join(&mut self) -> Result<(), CollectiveError> {
        Ok(())
    }

    /// Returns the time at which the operation ended, if it has and the time is known.
    fn ended(&self) -> Option<Instant> {
        None
    }
}

/// The result of one look at an operation.
pub(crate) struct Polled {
    /// Whether anything moved.
    pub moved: bool,
    /// The outcome, once there is one.
    pub outcome: Option<Outcome>,
}

/// The number of polls without progress before the first pause.
pub(crate) const SPINS: u32 = 200;
/// The longest pause between polls.
pub(crate) const PAUSE: Duration = Duration::from_micros(200);

impl Handle {
    pub(crate) fn of(work: Box<dyn InFlight>, operation: &'static str, sequence: u64) -> Handle {
        Handle {
            work,
            operation,
            sequence,
            outcome: None,
        }
    }

    /// Returns the operation's kind: `all_to_all`.
    pub fn operation(&self) -> &'static str {
        self.operation
    }

    /// Returns its number within the group.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Returns whether it has ended, with a result or an error; [`Handle::wait`] then returns at
    /// once.
    pub fn test(&mut self) -> bool {
        self.poll();
        self.outcome.is_some()
    }

    /// Waits until it has ended, at most until its deadline.
    ///
    /// # Errors
    /// The operation's failure.
    pub fn wait(self) -> Result<(), CollectiveError> {
        self.regions().map(|_| ())
    }

    /// Waits like [`Handle::wait`] and returns the time at which the operation ended, which may
    /// be long before; now, if that time is not known.
    ///
    /// # Errors
    /// The operation's failure.
    pub fn wait_timed(mut self) -> Result<Instant, CollectiveError> {
        self.end()?;
        Ok(self.work.ended().unwrap_or_else(Instant::now))
    }

    /// Returns whether later launches on the device see the result, as with NCCL. The operation
    /// may still fail, so call [`Handle::wait`] before you trust results.
    pub fn is_in_stream(&self) -> bool {
        self.work.in_order()
    }

    /// Returns whether the operation overlaps launches on the device, on another stream
    /// ([`Call::overlapped`](crate::Call::overlapped)). Launches after [`Handle::join`] see its
    /// result.
    pub fn is_overlapped(&self) -> bool {
        self.work.is_overlapped()
    }

    /// Makes later launches on the device see the result of an overlapped operation, without
    /// making the host wait. Does nothing for any other operation.
    ///
    /// # Errors
    /// When the device fails.
    pub fn join(&mut self) -> Result<(), CollectiveError> {
        self.work.join()
    }

    /// Returns as soon as later launches on the device see the result. Where operations are in
    /// the order of the device's stream, as with NCCL, that is immediately: the host does not
    /// wait, and a later failure is the error of a later call. Elsewhere it waits like
    /// [`Handle::wait`].
    ///
    /// # Errors
    /// The operation's failure.
    pub fn in_stream(mut self) -> Result<(), CollectiveError> {
        if self.work.is_overlapped() {
            self.join()?;
        } else if !self.work.in_order() {
            return self.wait();
        }
        self.poll();
        self.outcome
            .take()
            .map_or(Ok(()), |outcome| outcome.map(|_| ()))
    }

    pub(crate) fn regions(mut self) -> Outcome {
        self.end()
    }

    fn end(&mut self) -> Outcome {
        let mut idle = 0;
        loop {
            let moved = self.poll();
            if let Some(outcome) = self.outcome.take() {
                return outcome;
            }
            idle = if moved { 0 } else { idle + 1 };
            match idle {
                0 => {}
                // Most operations end within microseconds; only a long wait is worth a sleep.
                1..SPINS => std::thread::yield_now(),
                _ => std::thread::sleep(PAUSE.min(Duration::from_micros(u64::from(idle) / 10))),
            }
        }
    }

    /// Makes progress. Returns whether anything moved.
    fn poll(&mut self) -> bool {
        if self.outcome.is_some() {
            return false;
        }
        let Polled { moved, outcome } = self.work.poll();
        self.outcome = outcome;
        moved
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.outcome.is_none() {
            self.work.abandon();
        }
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Handle({} `{}`)", self.sequence, self.operation)
    }
}

/// Returns the only output, which is host memory.
pub(crate) fn host_result(handle: Handle) -> Result<Vec<u8>, CollectiveError> {
    let regions = handle.regions()?;
    Ok(regions
        .into_iter()
        .next()
        .map(Region::into_host)
        .unwrap_or_default())
}
