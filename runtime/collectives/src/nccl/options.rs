//! The options of ranks with a GPU each.

use super::{Fold, Meeting};
use crate::{CollectiveError, World};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The comparison of operations across ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checks {
    /// Compare every operation, by eager messages between hosts while data are in flight.
    #[default]
    Every,
    /// Never compare: ranks that call different operations time out or get wrong data.
    Off,
}

/// The order of sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sums {
    /// Rank order: the same bytes as with any other transport.
    #[default]
    InOrder,
    /// The library's own order, which is faster for large data. Bytes repeat only with the same
    /// library, machines and number of ranks; bf16 and f16 may be rounded at every step.
    Library,
}

/// The options of [`start`](super::start) and [`over`](super::over).
#[derive(Clone, Debug, Default)]
pub struct NcclOptions {
    /// The library. `None` selects `MOESAIC_NCCL`, else the loader's search path.
    pub library: Option<PathBuf>,
    /// The time in which all ranks must have started, and the deadline of operations. `None`
    /// selects `MOESAIC_DEADLINE` in seconds, else [`DEADLINE`](crate::DEADLINE).
    pub deadline: Option<Duration>,
    /// The comparison of operations between ranks.
    pub checks: Checks,
    /// The order of sums.
    pub sums: Sums,
    /// The implementation of folds on the device; `None` folds on the host.
    #[doc(hidden)]
    pub fold: Option<Arc<dyn Fold>>,
    /// Allow several ranks on one device, for experiments; the library has to allow it too.
    pub share_device: bool,
    /// Another name for this host, to make several out of one.
    pub host: Option<String>,
    /// The position of this process. `None` reads launchers' variables; without any the process
    /// is alone.
    pub world: Option<World>,
    /// The meeting point of ranks. `None` reads variables.
    pub meeting: Option<Meeting>,
    /// An MPI for meeting, tried after those of the machine.
    pub installed_mpi: Option<PathBuf>,
    /// The name that separates this job from others with the same meeting point. `None` reads
    /// launchers' variables.
    pub job: Option<String>,
}

impl NcclOptions {
    pub(super) fn deadline(&self) -> Result<Duration, CollectiveError> {
        match self.deadline {
            Some(deadline) => Ok(deadline),
            None => crate::mpi::deadline_of_environment(),
        }
    }
}
