//! The state that all groups of a rank share.

use super::find::Api;
use super::fold::Fold;
use super::options::{Checks, Sums};
use super::watch::{Board, Standing};
use crate::core::Shared;
use crate::handle::{Handle, InFlight, Polled};
use crate::{CollectiveError, CommElement, SetupError, Slice};
use moesaic_target::{Buffer, Device, DeviceError, Event, StreamDevice};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The time for which a rank that gives up waits for the library to release its device.
const BURIAL: Duration = Duration::from_secs(2);

pub struct NcclWorld {
    pub api: Arc<Api>,
    pub device: Arc<dyn Device>,
    pub board: Arc<Board>,
    pub fold: Arc<dyn Fold>,
    pub sums: Sums,
    pub checks: Checks,
    /// A number for barriers to reduce.
    pub token: Slice,
    scratch: Mutex<Scratch>,
    overlapped: Mutex<Option<OverlapStream>>,
}

/// A second stream of the device. Its operations never run at the same time as those of the
/// device's own stream: each waits for those before it, because the library must not have two
/// operations of a communicator at once.
struct OverlapStream {
    stream: Arc<dyn StreamDevice>,
    /// The event behind the last operation, until the device's own stream waits for it.
    last: Option<Arc<dyn Event>>,
    scratch: Scratch,
}

/// Memory between the phases of operations. Operations run in the order of one stream, so one
/// buffer serves all.
#[derive(Default)]
struct Scratch {
    buffer: Option<Arc<Buffer>>,
    /// Buffers that captured graphs use; a graph may be replayed at any time, so these are never
    /// freed.
    captured: Vec<Arc<Buffer>>,
}

/// The constituents of a world.
pub struct WorldParts {
    pub api: Arc<Api>,
    pub device: Arc<dyn Device>,
    pub fold: Arc<dyn Fold>,
    pub sums: Sums,
    pub checks: Checks,
}

impl NcclWorld {
    pub fn new(parts: WorldParts) -> Result<NcclWorld, CollectiveError> {
        let device = |error: DeviceError| CollectiveError::setup(error);
        let buffer = Arc::new(parts.device.alloc(4).map_err(device)?);
        parts.device.upload(&[0; 4], &buffer, 0).map_err(device)?;
        Ok(NcclWorld {
            api: parts.api,
            device: parts.device,
            board: Board::new()?,
            fold: parts.fold,
            sums: parts.sums,
            checks: parts.checks,
            token: Slice::whole(&buffer, CommElement::I32),
            scratch: Mutex::default(),
            overlapped: Mutex::default(),
        })
    }

    /// Returns the second stream, ordered behind everything that is on the device's own.
    pub fn overlapped(&self) -> Result<Arc<dyn StreamDevice>, DeviceError> {
        let mut overlapped = self
            .overlapped
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let own = self.device.streams()?;
        let stream = match &*overlapped {
            Some(overlapped) => Arc::clone(&overlapped.stream),
            None => {
                let stream = own.fork()?;
                *overlapped = Some(OverlapStream {
                    stream: Arc::clone(&stream),
                    last: None,
                    scratch: Scratch::default(),
                });
                stream
            }
        };
        stream.wait(&*own.record()?)?;
        Ok(stream)
    }

    /// Records `last` as the end of the second stream, for the device's own stream to wait for.
    pub fn set_overlap_end(&self, last: &Arc<dyn Event>) {
        let mut overlapped = self
            .overlapped
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(overlapped) = &mut *overlapped {
            overlapped.last = Some(Arc::clone(last));
        }
    }

    /// Makes the device's own stream wait for the second one.
    pub fn join(&self) -> Result<(), DeviceError> {
        let mut overlapped = self
            .overlapped
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match overlapped
            .as_mut()
            .and_then(|overlapped| overlapped.last.take())
        {
            Some(last) => self.device.streams()?.wait(&*last),
            None => Ok(()),
        }
    }

    /// Returns memory for an operation. While a graph is captured nothing may be allocated, so
    /// earlier operations must have reserved enough.
    pub fn scratch(&self, bytes: usize) -> Result<Slice, DeviceError> {
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        self.enough(&mut scratch, bytes)
    }

    /// Returns memory for an operation of the second stream.
    pub fn overlap_scratch(&self, bytes: usize) -> Result<Slice, DeviceError> {
        let mut overlapped = self
            .overlapped
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match &mut *overlapped {
            Some(overlapped) => self.enough(&mut overlapped.scratch, bytes),
            None => self.scratch(bytes),
        }
    }

    fn enough(&self, scratch: &mut Scratch, bytes: usize) -> Result<Slice, DeviceError> {
        let enough = |buffer: &&Arc<Buffer>| buffer.bytes() >= bytes;
        let buffer = match scratch.buffer.as_ref().filter(enough) {
            Some(buffer) => Arc::clone(buffer),
            None => {
                let grown = bytes.max(256).next_power_of_two();
                Arc::new(self.device.alloc(grown)?)
            }
        };
        scratch.buffer = Some(Arc::clone(&buffer));
        let known = |other: &Arc<Buffer>| Arc::ptr_eq(other, &buffer);
        if self.device.capturing().is_some() && !scratch.captured.iter().any(known) {
            scratch.captured.push(Arc::clone(&buffer));
        }
        Ok(Slice::whole(&buffer, CommElement::U8))
    }
}

impl Drop for NcclWorld {
    /// Fails everything, because kernels may still wait for other ranks.
    fn drop(&mut self) {
        if !self.board.is_closed() {
            let dropped = CollectiveError::setup(SetupError::Dropped);
            self.board.fail(None, dropped);
            self.board.buried_within(BURIAL);
            self.board.close(None);
        }
    }
}

/// An operation on the stream, and its comparison across ranks.
pub struct OnStream {
    pub world: Arc<NcclWorld>,
    pub id: u64,
    /// The transport of the comparison, and the comparison until it is complete.
    pub control: Option<Arc<Shared>>,
    pub agreement: Option<Handle>,
    /// The event behind the operation on the second stream, if it is there.
    pub overlapped: Option<Arc<dyn Event>>,
}

impl OnStream {
    /// Checks for news of the other ranks. Returns whether there was any.
    fn listen(&mut self) -> Result<bool, CollectiveError> {
        let board = &self.world.board;
        let Some(agreement) = &mut self.agreement else {
            // The comparison is complete; a rank may still have failed since.
            if let Some(control) = &self.control {
                overhear(board, control);
            }
            return Ok(false);
        };
        if !agreement.test() {
            return Ok(false);
        }
        let agreed = self.agreement.take().map_or(Ok(()), Handle::wait);
        agreed.map(|()| board.agreed(self.id)).map(|()| true)
    }

    fn outcome(&mut self) -> Polled {
        let ended = |outcome| Polled {
            moved: true,
            outcome: Some(outcome),
        };
        let mut moved = match self.listen() {
            Ok(moved) => moved,
            Err(error) => {
                self.world.board.fail(Some(self.id), error.clone());
                return ended(Err(error));
            }
        };
        match self.world.board.standing(self.id) {
            Standing::Failed(error) => {
                report_failure(&self.world.board, self.control.as_ref());
                ended(Err(error))
            }
            Standing::Done if self.agreement.is_none() => ended(Ok(Vec::new())),
            Standing::Running(Some(event)) => {
                // The prober finds and reports errors of the device.
                if event.passed().unwrap_or(false) {
                    self.world.board.done(self.id);
                    moved = true;
                }
                Polled {
                    moved,
                    outcome: None,
                }
            }
            _ => Polled {
                moved,
                outcome: None,
            },
        }
    }
}

impl InFlight for OnStream {
    fn poll(&mut self) -> Polled {
        let polled = self.outcome();
        if polled.outcome.is_some() {
            self.world.board.leave(self.id);
        }
        polled
    }

    fn abandon(&mut self) {
        self.world.board.leave(self.id);
    }

    fn in_order(&self) -> bool {
        self.overlapped.is_none()
    }

    fn is_overlapped(&self) -> bool {
        self.overlapped.is_some()
    }

    fn join(&mut self) -> Result<(), CollectiveError> {
        let Some(event) = &self.overlapped else {
            return Ok(());
        };
        let own = self.world.device.streams();
        let joined = own.and_then(|own| own.wait(&**event));
        joined.map_err(CollectiveError::setup)
    }
}

/// Passes a failure on to the other ranks. Only a rank's own calls do this, because no other
/// thread may call the transport of eager messages.
pub fn report_failure(board: &Board, control: Option<&Arc<Shared>>) {
    if let (Some(failure), Some(control)) = (board.failure(), control) {
        let mut core = control.lock();
        if core.failure().is_none() {
            core.fail(None, failure);
        }
    }
}

/// Fails the operations on the device when the transport of eager messages has failed, for
/// example because another rank has.
pub fn overhear(board: &Board, control: &Arc<Shared>) {
    let mut core = control.lock();
    core.progress();
    if let Some(failure) = core.failure() {
        board.fail(None, failure.clone());
    }
}
