//! What can go wrong, and where.

use std::fmt;
use std::time::Duration;

/// An operation, as errors name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct At {
    /// Its kind: `all_to_all`; empty between operations.
    pub operation: &'static str,
    /// Its number within the group, from 0.
    pub sequence: u64,
    /// What the caller called it; may be empty.
    pub label: String,
    /// The part of it that was going on: `inter-node exchange`.
    pub phase: &'static str,
    /// This rank, in the world.
    pub rank: usize,
}

impl At {
    /// A rank that is in no operation.
    pub(crate) fn outside(rank: usize) -> Box<At> {
        Box::new(At {
            operation: "",
            sequence: 0,
            label: String::new(),
            phase: "between operations",
            rank,
        })
    }
}

impl fmt::Display for At {
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

/// A rank that something is waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Its rank in the world.
    pub rank: usize,
    /// The last operation of this group that it was heard of: `6 all_gather`.
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

/// A collective operation that failed. After any but [`CollectiveError::Invalid`]
/// the group, and all that were split off the same world, can do nothing more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// The arguments cannot be right, whatever other ranks do. Nothing was started.
    #[error("{operation}: {reason}")]
    Invalid {
        /// What was called.
        operation: String,
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// Some ranks did not do their part in time.
    #[error(
        "{at}: not finished after {:.1} s; waiting for {}\n\
         these ranks are late, stopped, or did not call it; a longer deadline helps only the late",
        waited.as_secs_f64(), list(missing)
    )]
    Deadline {
        /// Which operation.
        at: Box<At>,
        /// Since its start.
        waited: Duration,
        /// Who is waited for.
        missing: Vec<Missing>,
    },
    /// Two ranks called different things.
    #[error(
        "{at}: {what} differs: {ours} here, {theirs} on rank {peer}\n\
         every rank of a group must call the same operations in the same order, with equal sizes"
    )]
    Mismatch {
        /// Which operation.
        at: Box<At>,
        /// The other rank, in the world.
        peer: usize,
        /// What differs: `the number of elements`.
        what: &'static str,
        /// This rank's.
        ours: String,
        /// The other's.
        theirs: String,
    },
    /// Another rank has failed or is gone.
    #[error("{at}: rank {peer} {cause}")]
    Peer {
        /// Which operation.
        at: Box<At>,
        /// The rank that failed, in the world.
        peer: usize,
        /// `has panicked`, `gave up: ...`.
        cause: String,
    },
    /// What carries the messages has failed.
    #[error("{at}: {transport} failed: {reason}")]
    Transport {
        /// Which operation.
        at: Box<At>,
        /// What carries the messages: `MPI (Open MPI 4.1.4)`.
        transport: String,
        /// What it said.
        reason: String,
    },
    /// The device failed to give or take data.
    #[error("{at}: {reason}")]
    Device {
        /// Which operation.
        at: Box<At>,
        /// What it said.
        reason: String,
    },
    /// Nothing can be done any more, since an earlier failure.
    #[error("{operation} is not possible: an earlier operation has failed\nthe failure: {cause}")]
    Failed {
        /// What was called.
        operation: String,
        /// The failure.
        cause: String,
    },
    /// The ranks do not run the same thing.
    #[error("the ranks do not agree: {}", differences.join("; "))]
    Disagreement {
        /// One for each thing and rank: ``` `plan` is `a` on rank 0 and `b` on rank 2 ```.
        differences: Vec<String>,
    },
    /// Two ranks have one device, which makes each wait for the other.
    #[error(
        "ranks {} and {} have the same device, {device} of host {host}; give each rank its own: \
         by LOCAL_RANK, or CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES",
        ranks[0], ranks[1]
    )]
    SharedDevice {
        /// Their ranks in the world.
        ranks: [usize; 2],
        /// The host they are on.
        host: String,
        /// The device's place on the bus.
        device: String,
    },
    /// The world cannot be set up.
    #[error("cannot set up the ranks: {reason}")]
    Setup {
        /// What was tried, what was found, and what would help.
        reason: String,
    },
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
