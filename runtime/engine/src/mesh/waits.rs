//! Start and end of exchanges in flight, and when a call waits for them.

use super::comm_cast::{IncomingRows, MAY_CAST};
use super::in_flight::{InFlight, Recording, Request, Written};
use super::mesh_call::MeshCall;
use crate::error::EngineError;
use crate::trace::{Activity, Lane};
use moesaic_plan::Exchange;
use std::sync::Arc;
use std::time::Instant;

impl MeshCall<'_> {
    /// Reports the start of an exchange to the recorder, if there is one.
    pub(super) fn begins(&self, exchange: &Exchange) -> Option<Recording> {
        let recorder = self.requests.recorder?;
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
            self.requests.in_flight.push(in_flight)
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
        self.requests.in_flight.push(InFlight {
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
        while let Some(at) = self.requests.in_flight.iter().position(needed) {
            if !self.requests.in_flight[at].handle.is_overlapped() {
                let one = self.requests.in_flight.remove(at);
                self.wait(one)?;
                continue;
            }
            let one = &mut self.requests.in_flight[at];
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
        let all = std::mem::take(&mut self.requests.in_flight);
        all.into_iter().try_for_each(|one| self.wait(one))
    }

    fn wait(&mut self, one: InFlight) -> Result<(), EngineError> {
        let end = one.handle.wait_timed()?;
        self.ended(one.recorded, end);
        self.unpack(one.incoming)
    }

    /// Reports the end of an exchange to the recorder.
    pub(super) fn ended(&self, recorded: Option<Recording>, end: Instant) {
        if let (Some(recorder), Some(Recording { activity, begin })) =
            (self.requests.recorder, recorded)
        {
            recorder.ended(&activity, begin, end);
        }
    }

    /// Casts arrived rows back.
    pub(super) fn unpack(&mut self, incoming: Option<IncomingRows>) -> Result<(), EngineError> {
        let Some(incoming) = incoming else {
            return Ok(());
        };
        let rows = Arc::clone(self.part(incoming.part).buffer(incoming.tensor));
        let cast = self.transfers.cast.as_mut().expect(MAY_CAST);
        cast.unpack(incoming, &rows)
    }
}
