//! Execution of plans on a stream: library calls, copies and folds, one after the other.

use super::comm::{Comm, Entered};
use super::fold::Folding;
use super::table::{BYTE, NcclTable, RawComm, RawStream};
use super::world::NcclWorld;
use crate::error::ErrorSite;
use crate::operation::{Next, Unequal};
use crate::schedules::{
    BufferRef, CollectivePlan, Copy, ExpectedCount, Message, ScheduleStep, Span,
};
use crate::transport::TransportError;
use crate::{CollectiveError, Slice};
use moesaic_target::{DeviceCopy, DeviceError, StreamDevice};
use std::ffi::c_int;
use std::time::Duration;

const PAUSE: Duration = Duration::from_micros(20);

/// An operation that is being put on the stream.
pub struct StreamLaunch<'a> {
    pub world: &'a NcclWorld,
    pub comm: Entered<'a>,
    pub gpu: &'a dyn StreamDevice,
    pub stream: RawStream,
    pub at: &'a ErrorSite,
    /// The ranks in the world, by rank in the group.
    pub members: &'a [usize],
}

/// The memory of an operation.
pub struct Operands {
    pub inputs: Vec<Slice>,
    pub outputs: Vec<Slice>,
    pub scratch: Slice,
}

type Done = Result<(), CollectiveError>;

impl StreamLaunch<'_> {
    /// Issues library calls as one group. On return they are on the stream and have not run.
    pub fn together(
        &self,
        calls: impl FnOnce(&NcclTable, RawComm, RawStream) -> Result<(), (&'static str, c_int)>,
    ) -> Done {
        let table = &self.comm.api().table;
        // SAFETY: no arguments; each start has its end below.
        let started = unsafe { table.group_start() };
        let called = calls(table, self.comm.raw(), self.stream);
        // SAFETY: as above.
        let ended = unsafe { table.group_end() };
        let checked = |function, code| self.comm.check(function, code);
        checked("ncclGroupStart", started)
            .and(called.or_else(|(function, code)| checked(function, code)))
            .and(checked("ncclGroupEnd", ended))
            .map_err(|reason| self.transport(reason))?;
        self.settle()
    }

    /// Waits until the library's non-blocking calls are on the stream; only then may an event or
    /// another call follow.
    fn settle(&self) -> Done {
        self.settled(&self.comm)
    }

    /// Waits until a communicator exists and has done what it began.
    pub fn wait_for(&self, comm: &Comm) -> Done {
        loop {
            if let Some(entered) = comm.enter() {
                return self.settled(&entered);
            }
            if let Some(failure) = self.world.board.failure() {
                return Err(failure);
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn settled(&self, comm: &Entered<'_>) -> Done {
        loop {
            // Checked first, because a communicator that was ended must not be queried.
            if let Some(failure) = self.world.board.failure() {
                return Err(failure);
            }
            if comm.settled().map_err(|reason| self.transport(reason))? {
                return Ok(());
            }
            std::thread::sleep(PAUSE);
        }
    }

    pub fn transport(&self, reason: TransportError) -> CollectiveError {
        CollectiveError::Transport {
            at: Box::new(self.at.clone()),
            transport: self.comm.api().name(),
            reason,
        }
    }

    pub fn device(&self, error: DeviceError) -> CollectiveError {
        CollectiveError::Device {
            at: Box::new(self.at.clone()),
            reason: Box::new(error),
        }
    }

    /// Executes a plan, then the plan that follows from what its exchanges brought.
    pub fn plan(&self, plan: &CollectivePlan, next: Option<Next>, operands: &mut Operands) -> Done {
        for step in &plan.steps {
            self.step(step, operands)?;
        }
        let Some(next) = next else {
            return Ok(());
        };
        let bytes = self.read(&operands.scratch, plan.scratch)?;
        let rest = next(&bytes).map_err(|unequal| self.unequal(&unequal))?;
        operands.scratch = self
            .world
            .scratch(rest.scratch)
            .map_err(|e| self.device(e))?;
        rest.steps
            .iter()
            .try_for_each(|step| self.step(step, operands))
    }

    fn step(&self, step: &ScheduleStep, operands: &Operands) -> Done {
        match step {
            ScheduleStep::Exchange {
                sends,
                receives,
                copies,
                ..
            } => {
                self.copies(copies, operands)?;
                self.exchange(sends, receives, operands)
            }
            ScheduleStep::Repack(copies) => self.copies(copies, operands),
            ScheduleStep::Write(offset, numbers) => {
                let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
                let scratch = &operands.scratch;
                let written =
                    self.world
                        .device
                        .upload(&bytes, scratch.buffer(), scratch.offset() + offset);
                written.map_err(|error| self.device(error))
            }
            ScheduleStep::Check { what, numbers } => self.check(what, numbers, operands),
            ScheduleStep::Reduce {
                element,
                reduction,
                rows,
                row_bytes,
                to,
                offset,
            } => {
                let from = Span::new(BufferRef::Scratch, rows.clone());
                let to = Span::new(*to, *offset..offset + row_bytes);
                let folding = Folding {
                    element: *element,
                    reduction: *reduction,
                    rows: self.part(&from, operands)?,
                    row_bytes: *row_bytes,
                    to: self.part(&to, operands)?,
                };
                match row_bytes {
                    0 => Ok(()),
                    _ => self.fold(&folding),
                }
            }
        }
    }

    fn fold(&self, folding: &Folding) -> Done {
        if self.world.fold.waits(folding.element) {
            self.catch_up()?;
        }
        let folded = self.world.fold.fold(folding);
        folded.map_err(|error| self.device(error))
    }

    /// Sends and receives messages. Both sides leave out empty ones, which NCCL would still
    /// launch.
    fn exchange(&self, sends: &[Message], receives: &[Message], operands: &Operands) -> Done {
        let parts = |list: &[Message]| -> Result<Vec<(c_int, Slice)>, CollectiveError> {
            let list = list.iter().filter(|message| message.span.bytes > 0);
            list.map(|message| Ok((message.peer as c_int, self.part(&message.span, operands)?)))
                .collect()
        };
        let (sends, receives) = (parts(sends)?, parts(receives)?);
        if sends.is_empty() && receives.is_empty() {
            return Ok(());
        }
        self.together(|table, comm, stream| {
            for (peer, part) in &sends {
                // SAFETY: the memory is kept until the stream has passed the operation.
                let code =
                    unsafe { table.send(part.address(), part.bytes(), BYTE, *peer, comm, stream) };
                done("ncclSend", code)?;
            }
            for (peer, part) in &receives {
                // SAFETY: as above.
                let code = unsafe {
                    table.receive(part.address(), part.bytes(), BYTE, *peer, comm, stream)
                };
                done("ncclRecv", code)?;
            }
            Ok(())
        })
    }

    fn copies(&self, copies: &[Copy], operands: &Operands) -> Done {
        for copy in copies.iter().filter(|copy| copy.from.bytes > 0) {
            let from = self.part(&copy.from, operands)?;
            let end = copy.offset + copy.from.bytes;
            let to = self.part(&Span::new(copy.to, copy.offset..end), operands)?;
            if from.address() == to.address() {
                continue;
            }
            let copied = self.gpu.copy(&DeviceCopy {
                from: from.buffer(),
                from_offset: from.offset(),
                to: to.buffer(),
                to_offset: to.offset(),
                bytes: from.bytes(),
            });
            copied.map_err(|error| self.device(error))?;
        }
        Ok(())
    }

    /// Returns the memory of a span.
    fn part(&self, span: &Span, operands: &Operands) -> Result<Slice, CollectiveError> {
        let slice = match span.buffer {
            BufferRef::Input(index) => operands.inputs.get(index),
            BufferRef::Output(index) => operands.outputs.get(index),
            BufferRef::Scratch => Some(&operands.scratch),
        };
        let part = slice.and_then(|slice| slice.part(span.offset, span.bytes));
        part.ok_or_else(|| CollectiveError::Invalid {
            operation: self.at.to_string(),
            reason: format!("bytes of {span:?} are not there").into(),
        })
    }

    fn check(&self, what: &'static str, numbers: &[ExpectedCount], operands: &Operands) -> Done {
        let end = numbers.iter().map(|number| number.offset + 8).max();
        let bytes = self.read(&operands.scratch, end.unwrap_or(0))?;
        for expected in numbers {
            let theirs = bytes[expected.offset..]
                .first_chunk()
                .map(|n| u64::from_le_bytes(*n));
            let theirs = theirs.unwrap_or_default();
            if theirs != expected.value {
                return Err(self.unequal(&Unequal {
                    what,
                    peer: expected.peer,
                    ours: expected.value,
                    theirs,
                }));
            }
        }
        Ok(())
    }

    fn unequal(&self, unequal: &Unequal) -> CollectiveError {
        CollectiveError::Mismatch {
            at: Box::new(self.at.clone()),
            peer: self.members[unequal.peer],
            what: unequal.what,
            ours: unequal.ours.to_string(),
            theirs: unequal.theirs.to_string(),
        }
    }

    fn read(&self, slice: &Slice, bytes: usize) -> Result<Vec<u8>, CollectiveError> {
        self.catch_up()?;
        let mut read = vec![0; bytes];
        let device = &self.world.device;
        let done = device.download(slice.buffer(), slice.offset(), &mut read);
        done.map(|()| read).map_err(|error| self.device(error))
    }

    /// Waits until the stream has arrived here or the world has failed. It polls an event,
    /// because a wait inside the driver would outlast the operation's deadline.
    fn catch_up(&self) -> Done {
        let event = self.gpu.record().map_err(|error| self.device(error))?;
        while !event.passed().map_err(|error| self.device(error))? {
            if let Some(failure) = self.world.board.failure() {
                return Err(failure);
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }
}

/// Converts a return code for [`StreamLaunch::together`].
pub fn done(function: &'static str, code: c_int) -> Result<(), (&'static str, c_int)> {
    match code {
        0 => Ok(()),
        code => Err((function, code)),
    }
}
