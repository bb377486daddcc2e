//! Exchanges in flight: their requests, and what they write.

use super::comm_cast::IncomingRows;
use crate::trace::Activity;
use moesaic_collectives::{Handle, Slice, Transfer};
use moesaic_plan::{PlanPart, TensorId};
use std::ops::Range;
use std::time::Instant;

/// An exchange that has started.
pub(super) struct Request {
    pub handle: Handle,
    /// The bytes that this rank sends to others.
    pub bytes: u64,
    /// Cast rows that arrive and have to be cast back.
    pub incoming: Option<IncomingRows>,
}

impl Request {
    /// Makes the request of messages that rank `own` sends.
    pub fn sending(handle: Handle, own: usize, sends: &[Transfer]) -> Request {
        let others = sends.iter().filter(|send| send.peer != own);
        Request {
            handle,
            bytes: others.map(|send| send.slice.bytes() as u64).sum(),
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
    pub activity: Activity,
    pub begin: Instant,
}

/// An exchange that nobody has waited for yet.
pub(super) struct InFlight {
    pub handle: Handle,
    /// The rows that it writes, for each tensor.
    pub writes: Vec<Written>,
    pub recorded: Option<Recording>,
    /// The cast rows to cast back when the exchange has ended.
    pub incoming: Option<IncomingRows>,
}
