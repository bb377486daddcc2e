//! Errors of operations, and the operation and rank they happened on.

mod invalid;
mod setup;

pub use invalid::InvalidReason;
pub(crate) use setup::shown;
pub use setup::{MeetingError, SetupError};

use crate::transport::TransportError;
use moesaic_target::DeviceError;
use std::fmt;
use std::time::Duration;

/// The position of an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorSite {
    /// The operation's kind: `all_to_all`; empty between operations.
    pub operation: &'static str,
    /// Its number within the group, from 0.
    pub sequence: u64,
    /// The caller's label; may be empty.
    pub label: String,
    /// The phase that was in progress: `inter-node exchange`.
    pub phase: &'static str,
    /// This rank, in the world.
    pub rank: usize,
}

impl ErrorSite {
    /// Returns the position of a rank that is in no operation.
    pub(crate) fn outside(rank: usize) -> Box<ErrorSite> {
        Box::new(ErrorSite {
            operation: "",
            sequence: 0,
            label: String::new(),
            phase: "between operations",
            rank,
        })
    }
}

impl fmt::Display for ErrorSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.operation.is_empty() {
            return write!(f, "rank {}, {}", self.rank, self.phase);
        }
        write!(
            f,
            "rank {}, operation {} `{}`",
            self.rank, self.sequence, self.operation
        )?;
        if !self.label.is_empty() {
            write!(f, " ({})", self.label)?;
        }
        write!(f, ", phase `{}`", self.phase)
    }
}

/// A rank that an operation waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Its rank in the world.
    pub rank: usize,
    /// The last operation of this group that the rank announced: `6 all_gather`.
    pub heard: Option<String>,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.heard {
            Some(heard) => write!(f, "rank {} (last heard of in operation {heard})", self.rank),
            None => write!(f, "rank {} (not heard of yet)", self.rank),
        }
    }
}

/// A failed collective operation. After any error but [`CollectiveError::Invalid`], the group and
/// all groups split off the same world are unusable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// The arguments cannot be right, whatever other ranks do. Nothing was started.
    #[error("{operation}: {reason}")]
    Invalid {
        /// The function that was called.
        operation: String,
        /// The problem, and what would be right.
        #[source]
        reason: InvalidReason,
    },
    /// Some ranks did not do their part in time.
    #[error(
        "{at}: not finished after {:.1} s; waiting for {}\n\
         these ranks are late, stopped, or did not call it; a longer deadline helps only the late",
        waited.as_secs_f64(), list(missing)
    )]
    Deadline {
        /// The operation.
        at: Box<ErrorSite>,
        /// The time since its start.
        waited: Duration,
        /// The ranks that are waited for.
        missing: Vec<Missing>,
    },
    /// Two ranks called different things.
    #[error(
        "{at}: {what} differs: {ours} here, {theirs} on rank {peer}\n\
         every rank of a group must call the same operations in the same order, with equal sizes"
    )]
    Mismatch {
        /// The operation.
        at: Box<ErrorSite>,
        /// The other rank, in the world.
        peer: usize,
        /// The property that differs: `the number of elements`.
        what: &'static str,
        /// The value on this rank.
        ours: String,
        /// The value on the other rank.
        theirs: String,
    },
    /// Another rank has failed or is gone.
    #[error("{at}: rank {peer} {cause}")]
    Peer {
        /// The operation.
        at: Box<ErrorSite>,
        /// The rank that failed, in the world.
        peer: usize,
        /// The reason: `has panicked`, `gave up: ...`.
        cause: String,
    },
    /// The transport has failed.
    #[error("{at}: {transport} failed: {reason}")]
    Transport {
        /// The operation.
        at: Box<ErrorSite>,
        /// The transport's name and version: `MPI (Open MPI 4.1.4)`.
        transport: String,
        /// The failure.
        #[source]
        reason: TransportError,
    },
    /// The device failed to read or write data.
    #[error("{at}: {reason}")]
    Device {
        /// The operation.
        at: Box<ErrorSite>,
        /// The device's error.
        #[source]
        reason: Box<DeviceError>,
    },
    /// An earlier failure has made the group unusable.
    #[error("{operation} is not possible: an earlier operation has failed\nthe failure: {cause}")]
    Failed {
        /// The function that was called.
        operation: String,
        /// The earlier failure.
        #[source]
        cause: Box<CollectiveError>,
    },
    /// The ranks run different things.
    #[error("the ranks do not agree: {}", differences.join("; "))]
    Disagreement {
        /// One entry for each property and rank: ``` `plan` is `a` on rank 0 and `b` on rank 2
        /// ```.
        differences: Vec<String>,
    },
    /// Two ranks share a device, so each would wait forever for the other.
    #[error(
        "ranks {} and {} have the same device, {device} of host {host}; give each rank its own: \
         by LOCAL_RANK, or CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES",
        ranks[0], ranks[1]
    )]
    SharedDevice {
        /// Their ranks in the world.
        ranks: [usize; 2],
        /// Their host.
        host: String,
        /// The device's bus address.
        device: String,
    },
    /// The world cannot be set up.
    #[error("cannot set up the ranks: {0}")]
    Setup(#[source] SetupError),
}

impl CollectiveError {
    /// Returns the error of a world that cannot be set up, or is no more.
    pub fn setup(error: impl Into<SetupError>) -> CollectiveError {
        CollectiveError::Setup(error.into())
    }
}

fn list(missing: &[Missing]) -> String {
    const SHOWN: usize = 8;
    let mut text = missing
        .iter()
        .take(SHOWN)
        .map(Missing::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    if missing.len() > SHOWN {
        text += &format!(" and {} more", missing.len() - SHOWN);
    }
    text
}
