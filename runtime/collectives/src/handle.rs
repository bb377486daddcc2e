//! An operation that was started.

use crate::CollectiveError;
use crate::core::{Core, Outcome, Shared};
use crate::memory::Region;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

/// An operation in flight. Dropping it ends nothing: the operation goes on in later calls,
/// and keeps its memory.
#[must_use = "an operation is finished only when `wait` has returned"]
pub struct Handle {
    work: Box<dyn Work>,
    operation: &'static str,
    sequence: u64,
    outcome: Option<Outcome>,
}

/// What a handle is of.
pub(crate) trait Work: Send {
    /// Does what can be done; whether anything was, and the outcome if there is one.
    fn poll(&mut self) -> (bool, Option<Outcome>);

    /// Nobody will ask any more.
    fn abandon(&mut self);

    /// Whether it is in the order of the device's stream, so that what is launched next
    /// sees its result.
    fn in_order(&self) -> bool {
        false
    }

    /// Whether it is in the order of another stream of the device.
    fn is_overlapped(&self) -> bool {
        false
    }

    /// What is launched on the device from now on sees its result, where it is overlapped.
    fn join(&mut self) -> Result<(), CollectiveError> {
        Ok(())
    }

    /// When it has ended, if it has and that is known.
    fn ended(&self) -> Option<Instant> {
        None
    }
}

/// An operation over an transport.
struct OfCore {
    core: Arc<Shared>,
    id: u64,
    ended: Option<Instant>,
}

impl Work for OfCore {
    fn poll(&mut self) -> (bool, Option<Outcome>) {
        let mut core = lock(&self.core);
        let moved = core.progress_for(self.id);
        let mut outcome = core.take(self.id);
        if outcome.is_none() && !moved {
            core.expire(self.id);
            outcome = core.take(self.id);
        }
        let Some((outcome, ended)) = outcome else {
            return (moved, None);
        };
        self.ended = Some(ended);
        (moved, Some(outcome))
    }

    fn ended(&self) -> Option<Instant> {
        self.ended
    }

    fn abandon(&mut self) {
        lock(&self.core).abandon(self.id);
    }
}

/// Calls that found nothing to do before the first pause.
pub(crate) const EAGER: u32 = 200;
/// The longest pause.
pub(crate) const PAUSE: Duration = Duration::from_micros(200);

pub(crate) fn lock(core: &Shared) -> MutexGuard<'_, Core> {
    core.lock()
}

impl Handle {
    pub(crate) fn new(
        core: &Arc<Shared>,
        id: u64,
        operation: &'static str,
        sequence: u64,
    ) -> Handle {
        let core = Arc::clone(core);
        let work = OfCore {
            core,
            id,
            ended: None,
        };
        Handle::of(Box::new(work), operation, sequence)
    }

    pub(crate) fn of(work: Box<dyn Work>, operation: &'static str, sequence: u64) -> Handle {
        Handle {
            work,
            operation,
            sequence,
            outcome: None,
        }
    }

    /// The operation's kind: `all_to_all`.
    pub fn operation(&self) -> &'static str {
        self.operation
    }

    /// Its number within the group.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Whether it has ended, well or not; [`Handle::wait`] then returns at once.
    pub fn test(&mut self) -> bool {
        self.poll();
        self.outcome.is_some()
    }

    /// Waits until it has ended, at most until its deadline.
    ///
    /// # Errors
    /// Whatever made it fail.
    pub fn wait(self) -> Result<(), CollectiveError> {
        self.regions().map(|_| ())
    }

    /// As [`Handle::wait`]; says when it has ended, which may be long before, or now if that
    /// is not known.
    ///
    /// # Errors
    /// Whatever made it fail.
    pub fn wait_timed(mut self) -> Result<Instant, CollectiveError> {
        self.end()?;
        Ok(self.work.ended().unwrap_or_else(Instant::now))
    }

    /// Whether what is launched on the device from now on sees the result, as with NCCL.
    /// It may still fail: ask [`Handle::wait`] before results are believed.
    pub fn is_in_stream(&self) -> bool {
        self.work.in_order()
    }

    /// Whether it goes on overlapped what is launched on the device, in the order of another stream
    /// ([`Call::overlapped`](crate::Call::overlapped)): what is launched after [`Handle::join`] sees the
    /// result.
    pub fn is_overlapped(&self) -> bool {
        self.work.is_overlapped()
    }

    /// From now on what is launched on the device sees the result of what goes on overlapped; the
    /// host does not wait. Nothing for all else.
    ///
    /// # Errors
    /// When the device fails.
    pub fn join(&mut self) -> Result<(), CollectiveError> {
        self.work.join()
    }

    /// Until what is launched on the device from now on sees the result. Where operations
    /// are in the order of its stream, as with NCCL, that is at once: the host does not
    /// wait, and what fails later is the error of a later call. Else as [`Handle::wait`].
    ///
    /// # Errors
    /// Whatever has made it fail.
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
                1..EAGER => std::thread::yield_now(),
                _ => std::thread::sleep(PAUSE.min(Duration::from_micros(u64::from(idle) / 10))),
            }
        }
    }

    /// Does what can be done; whether anything was.
    fn poll(&mut self) -> bool {
        if self.outcome.is_some() {
            return false;
        }
        let (moved, outcome) = self.work.poll();
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

/// The only result that is memory of the host.
pub(crate) fn host_result(handle: Handle) -> Result<Vec<u8>, CollectiveError> {
    let regions = handle.regions()?;
    Ok(regions
        .into_iter()
        .next()
        .map(Region::into_host)
        .unwrap_or_default())
}
