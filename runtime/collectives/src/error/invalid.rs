//! The reasons an operation was refused before anything was sent.

use crate::schedules::{CommElement, ScheduleError};
use moesaic_target::DeviceError;

/// The reason an operation cannot be right, whatever other ranks do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidReason {
    /// Arguments that contradict each other or the group: which, and what would be right.
    #[error("{0}")]
    Arguments(String),
    /// A slice that is larger than its buffer.
    #[error("{elements} {element} from element {first} do not fit in a buffer of {bytes} bytes")]
    Slice {
        /// The first element.
        first: usize,
        /// The number of elements.
        elements: usize,
        /// Their type.
        element: CommElement,
        /// The bytes of the buffer.
        bytes: usize,
    },
    /// The device has no memory for the operation, or cannot read or write it.
    #[error(transparent)]
    Device(Box<DeviceError>),
    /// Messages that differ from the counts that were exchanged.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// An operation that a graph which is being captured cannot hold.
    #[error("it cannot be a part of graph `{graph}`{}", why.map_or(String::new(), |why| format!(": {why}")))]
    Captured {
        /// The graph.
        graph: String,
        /// The reason, if it is not the same for all graphs.
        why: Option<&'static str>,
    },
    /// The world cannot end while a rank still has something in flight.
    #[error("{operation} {}; wait for it first", if *meanwhile { "was begun meanwhile" } else { "is still in flight" })]
    InFlight {
        /// The operation.
        operation: String,
        /// Whether it was begun by another thread, after all ranks agreed to end.
        meanwhile: bool,
    },
    /// A measurement received other bytes than were sent.
    #[error("what rank {from} has sent arrived changed on rank {to}")]
    Changed {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
    },
    /// A measurement of levels needs nodes with equally many ranks, one node after the other.
    #[error(
        "nodes have unequally many ranks, or ranks that are not in a row; start as many on each, \
         one node's after the other's"
    )]
    UnequalNodes,
    /// Ranks sent the tokens of other rows than they had announced.
    #[error("ranks sent the tokens of other rows than they counted")]
    Rows,
}

impl From<DeviceError> for InvalidReason {
    fn from(error: DeviceError) -> InvalidReason {
        // In a box, because every result of an operation is as large as its error.
        InvalidReason::Device(Box::new(error))
    }
}

impl From<String> for InvalidReason {
    fn from(arguments: String) -> InvalidReason {
        InvalidReason::Arguments(arguments)
    }
}
