//! Exchanges in flight, and when a call waits for them.

use super::comm_cast::IncomingRows;
use super::mesh_call::MeshCall;
use crate::error::EngineError;
use crate::trace::{Activity, Lane};
use moesaic_collectives::{Handle, Slice, Transfer};
use moesaic_plan::{Exchange, PlanPart, TensorId};
use std::ops::Range;
use std::time::Instant;

/// An exchange that has started.
pub(super) struct Request {
    pub handle: Handle,
    /// The bytes that this rank sends.
    pub bytes: u64,
    /// Cast rows that arrive and have to be cast back.
    pub incoming: Option<IncomingRows>,
}

impl Request {
    /// Makes the request of messages that this rank sends.
    pub fn sending(handle: Handle, sends: &[Transfer]) -> Request {
        Request {
            handle,
            bytes: sends.iter().map(|send| send.slice.bytes() as u64).sum(),
            incoming: None,
        }
    }

    /// Makes the request of a collective over `data`.
    pub fn of(handle: Handle, data: &Slice) -> Request {
        Request {
            handle,
            bytes: data.bytes() as u64,
            incoming: None,
        }
    }
}

/// The rows that an exchange writes.
#[derive(Clone, Debug)]
pub(super) struct Written {
    pub part: PlanPart,
    pub tensor: TensorId,
    /// The indices of chunks of [`Rows`](super::rows::Rows).
    pub chunks: Range<usize>,
}

impl Written {
    /// Returns whether the exchange writes rows of any of these chunks.
    pub fn shares(&self, chunks: &Range<usize>) -> bool {
        self.chunks.start < chunks.end && chunks.start < self.chunks.end
    }
}

/// The activity that a recorder saw begin, and when.
pub(super) struct Recording {
    activity: Activity,
    begin: Instant,
}

/// An exchange that nobody has waited for yet.
pub(super) struct InFlight {
    handle: Handle,
    /// The rows that it writes, for each tensor.
    writes: Vec<Written>,
    recorded: Option<Recording>,
    /// The cast rows to cast back when the exchange has ended.
    incoming: Option<IncomingRows>,
}

impl MeshCall<'_> {
    /// Reports the start of an exchange to the recorder, if there is one.
    pub(super) fn begins(&self, exchange: &Exchange) -> Option<Recording> {
        let recorder = self.recorder?;
        let activity = Activity {
            lane: Lane::Exchange,
            name: exchange.name.clone(),
            chunk: exchange.chunk,
            bytes: 0,
        };
        recorder.begins(&activity);
        let begin = Instant::now();
        Some(Recording { activity, begin })
    }

    /// Waits until launches that follow see the result. The exchange of a chunk is waited for only
    /// when something needs its rows, and one in stream order only when the pass has been launched.
    pub(super) fn keep(
        &mut self,
        exchange: &Exchange,
        request: Request,
        writes: Vec<Written>,
        recorded: Option<Recording>,
    ) -> Result<(), EngineError> {
        let Request {
            handle,
            bytes,
            incoming,
        } = request;
        let recorded = recorded.map(|mut recording| {
            recording.activity.bytes = bytes;
            recording
        });
        let in_stream = handle.is_in_stream();
        let later = in_stream || handle.is_overlapped() || exchange.chunk.is_some();
        let mut in_flight = InFlight {
            handle,
            writes,
            recorded,
            incoming,
        };
        if in_stream {
            // In stream order the cast back is simply the next launch; waiting here would stall the
            // host for nothing.
            self.unpack(in_flight.incoming.take())?;
        }
        if later {
            self.in_flight.push(in_flight)
        } else {
            self.wait(in_flight)?
        }
        Ok(())
    }

    /// Waits until launches that follow see the result of an exchange that is not recorded.
    pub(super) fn complete(&mut self, request: Request) -> Result<(), EngineError> {
        let handle = request.handle;
        if !handle.is_in_stream() {
            return Ok(handle.wait()?);
        }
        self.in_flight.push(InFlight {
            handle,
            writes: Vec::new(),
            recorded: None,
            incoming: None,
        });
        Ok(())
    }

    /// Waits for the exchanges that write what `needed` selects. An exchange in the order of the
    /// device's stream needs no wait. For one on another stream the device's stream waits, and the
    /// host does not.
    pub(super) fn wait_for(
        &mut self,
        needed: impl Fn(&Written) -> bool,
    ) -> Result<(), EngineError> {
        let needed = |one: &InFlight| !one.handle.is_in_stream() && one.writes.iter().any(&needed);
        while let Some(at) = self.in_flight.iter().position(needed) {
            if !self.in_flight[at].handle.is_overlapped() {
                let one = self.in_flight.remove(at);
                self.wait(one)?;
                continue;
            }
            let one = &mut self.in_flight[at];
            // On a second stream only the device waits: `join` makes its own stream wait for the
            // exchange. The handle stays in flight, because an error is only known at its end.
            one.handle.join()?;
            one.writes.clear();
            let incoming = one.incoming.take();
            self.unpack(incoming)?;
        }
        Ok(())
    }

    /// Waits for all exchanges in flight.
    pub(super) fn finish_all(&mut self) -> Result<(), EngineError> {
        let all = std::mem::take(&mut self.in_flight);
        all.into_iter().try_for_each(|one| self.wait(one))
    }

    fn wait(&mut self, one: InFlight) -> Result<(), EngineError> {
        let end = one.handle.wait_timed()?;
        self.ended(one.recorded, end);
        self.unpack(one.incoming)
    }

    /// Reports the end of an exchange to the recorder.
    pub(super) fn ended(&self, recorded: Option<Recording>, end: Instant) {
        if let (Some(recorder), Some(Recording { activity, begin })) = (self.recorder, recorded) {
            recorder.ended(&activity, begin, end);
        }
    }
}
