//! Exchanges that are begun, and when they are waited for.

use super::run::Run;
use super::wire::Coming;
use crate::error::EngineError;
use crate::trace::{Activity, Lane};
use moesaic_collectives::{Handle, Slice, Transfer};
use moesaic_plan::{Exchange, Side, TensorId};
use std::ops::Range;
use std::time::Instant;

/// An exchange that was begun.
pub(super) struct Started {
    pub handle: Handle,
    /// Of what this rank sends.
    pub bytes: u64,
    /// Rows that come packed.
    pub coming: Option<Coming>,
}

impl Started {
    /// Of messages of this rank.
    pub fn sending(handle: Handle, sends: &[Transfer]) -> Started {
        Started {
            handle,
            bytes: sends.iter().map(|send| send.slice.bytes() as u64).sum(),
            coming: None,
        }
    }

    /// Of data of all ranks.
    pub fn of(handle: Handle, data: &Slice) -> Started {
        Started {
            handle,
            bytes: data.bytes() as u64,
            coming: None,
        }
    }
}

/// Rows that an exchange writes.
#[derive(Clone, Debug)]
pub(super) struct Written {
    pub side: Side,
    pub tensor: TensorId,
    /// Numbers of pieces of [`Rows`](super::rows::Rows).
    pub pieces: Range<usize>,
}

impl Written {
    /// Whether rows of any of these pieces are among them.
    pub fn shares(&self, pieces: &Range<usize>) -> bool {
        self.pieces.start < pieces.end && pieces.start < self.pieces.end
    }
}

/// What a recorder was told when an exchange began, if there is one.
pub(super) type Recording = Option<(Activity, Instant)>;

/// An exchange that is not waited for yet.
pub(super) struct UnderWay {
    handle: Handle,
    /// Of each tensor.
    writes: Vec<Written>,
    recorded: Recording,
    /// What is unpacked when it has ended.
    coming: Option<Coming>,
}

impl Run<'_> {
    /// Tells a recorder that an exchange begins, if there is one.
    pub(super) fn begins(&self, exchange: &Exchange) -> Recording {
        let recorder = self.recorder?;
        let activity = Activity {
            lane: Lane::Exchange,
            name: exchange.name.clone(),
            piece: exchange.piece,
            bytes: 0,
        };
        recorder.begins(&activity);
        Some((activity, Instant::now()))
    }

    /// Waits until launches that follow see the result, unless it is of a piece: then until
    /// something needs it. What is in the stream's order is waited for when the pass has been
    /// launched.
    pub(super) fn keep(
        &mut self,
        exchange: &Exchange,
        started: Started,
        writes: Vec<Written>,
        recorded: Recording,
    ) -> Result<(), EngineError> {
        let Started {
            handle,
            bytes,
            coming,
        } = started;
        let recorded = recorded.map(|(activity, begin)| (Activity { bytes, ..activity }, begin));
        let in_stream = handle.is_in_stream();
        let later = in_stream || handle.is_beside() || exchange.piece.is_some();
        let mut under_way = UnderWay {
            handle,
            writes,
            recorded,
            coming,
        };
        if in_stream {
            self.unpack(under_way.coming.take())?;
        }
        if later {
            self.under_way.push(under_way)
        } else {
            self.wait(under_way)?
        }
        Ok(())
    }

    /// Until launches that follow see the result, of an exchange that is not recorded.
    pub(super) fn complete(&mut self, started: Started) -> Result<(), EngineError> {
        let handle = started.handle;
        if !handle.is_in_stream() {
            return Ok(handle.wait()?);
        }
        self.under_way.push(UnderWay {
            handle,
            writes: Vec::new(),
            recorded: None,
            coming: None,
        });
        Ok(())
    }

    /// Waits for those that write what is needed; what is in the order of the device's stream
    /// needs no waiting for, and for what is on another one that stream waits.
    pub(super) fn wait_for(
        &mut self,
        needed: impl Fn(&Written) -> bool,
    ) -> Result<(), EngineError> {
        let needed = |one: &UnderWay| !one.handle.is_in_stream() && one.writes.iter().any(&needed);
        while let Some(at) = self.under_way.iter().position(needed) {
            if !self.under_way[at].handle.is_beside() {
                let one = self.under_way.remove(at);
                self.wait(one)?;
                continue;
            }
            let one = &mut self.under_way[at];
            one.handle.join()?;
            one.writes.clear();
            let coming = one.coming.take();
            self.unpack(coming)?;
        }
        Ok(())
    }

    /// Waits for all.
    pub(super) fn finish_all(&mut self) -> Result<(), EngineError> {
        let all = std::mem::take(&mut self.under_way);
        all.into_iter().try_for_each(|one| self.wait(one))
    }

    fn wait(&mut self, one: UnderWay) -> Result<(), EngineError> {
        let end = one.handle.wait_timed()?;
        self.ended(one.recorded, end);
        self.unpack(one.coming)
    }

    /// Tells the recorder that an exchange has ended.
    pub(super) fn ended(&self, recorded: Recording, end: Instant) {
        if let (Some(recorder), Some((activity, begin))) = (self.recorder, recorded) {
            recorder.ended(&activity, begin, end);
        }
    }
}
