//! Ranks that are processes under MPI, started by any `mpirun` or `srun`.
//!
//! The library is opened at run time, through the standard ABI of MPI 5 or those of Open MPI and
//! MPICH; building needs no MPI. Only non-blocking point-to-point messages are used. Two calls
//! may block: `MPI_Init_thread` and `MPI_Finalize`. A watchdog limits the first (`watch.rs`); the
//! second is only called after a barrier with a deadline has shown that all ranks are there.

mod abi;
mod find;
mod handle;
mod messages;
mod table;
mod transport;
mod watch;

use crate::world::World;
use crate::{CollectiveError, Communicator, DEADLINE, SetupError};
use moesaic_target::Device;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The options of [`start`].
#[derive(Clone, Debug, Default)]
pub struct MpiOptions {
    /// The library. `None` selects `MOESAIC_MPI`, else the launcher's library, else any.
    pub library: Option<PathBuf>,
    /// A library to try after those of the machine.
    pub installed: Option<PathBuf>,
    /// The time in which all ranks must have started, and the deadline of operations. `None`
    /// selects `MOESAIC_DEADLINE` in seconds, else [`DEADLINE`].
    pub deadline: Option<Duration>,
}

impl MpiOptions {
    fn deadline(&self) -> Result<Duration, CollectiveError> {
        match self.deadline {
            Some(deadline) => Ok(deadline),
            None => deadline_of_environment(),
        }
    }
}

/// Reads `MOESAIC_DEADLINE`; an empty value counts as unset, because scripts may leave one.
pub(crate) fn deadline_of_environment() -> Result<Duration, CollectiveError> {
    let text = std::env::var("MOESAIC_DEADLINE").ok();
    seconds(text.as_deref().filter(|text| !text.is_empty()))
}

fn seconds(text: Option<&str>) -> Result<Duration, CollectiveError> {
    let Some(text) = text else {
        return Ok(DEADLINE);
    };
    let seconds = text.trim().parse::<f64>().ok();
    let seconds = seconds.filter(|seconds| *seconds > 0.0 && *seconds < 1e9);
    seconds.map(Duration::from_secs_f64).ok_or_else(|| {
        CollectiveError::setup(SetupError::Variable {
            name: "MOESAIC_DEADLINE".to_string(),
            value: text.to_string(),
            expected: "a number of seconds above 0",
        })
    })
}

/// Joins the ranks that the launcher has started. A process that was started without a launcher
/// is a world of one.
///
/// Call it once per process, before other threads use MPI. A world that is not ended by
/// [`Communicator::finish`] never finalizes MPI, and the launcher may complain.
///
/// # Errors
/// [`CollectiveError::Setup`] when no library is found, when it does not belong to the launcher,
/// or when ranks do not start in time.
///
/// # When a rank never comes
/// `MPI_Init` waits for all processes of the launcher and cannot be cancelled. If it has not
/// returned by the deadline (at least 5 seconds), the process reports that on standard error and
/// ends with exit code [`NOT_TOGETHER`].
pub fn start(
    options: &MpiOptions,
    device: Arc<dyn Device>,
) -> Result<Communicator, CollectiveError> {
    let launched = World::from_environment()?;
    let deadline = options.deadline()?;
    let library = find::open(options.library.as_deref(), options.installed.as_deref())?;
    let (calls, abi) = abi::load(library).map_err(find::no_library)?;
    let path = calls.library().to_string();
    let version = transport::version(&*calls).map_err(CollectiveError::setup)?;
    find::fits(launched.as_ref(), abi.name, (&path, &version))?;
    let mpi = transport::Mpi::start(calls, abi, deadline).map_err(CollectiveError::setup)?;
    let communicator = Communicator::new(Box::new(mpi), device).with_deadline(deadline);
    match launched {
        Some(world) => world.must_be(&communicator, &path).map(|()| communicator),
        None => Ok(communicator),
    }
}

/// The exit code of a process whose `MPI_Init` does not return in time: see [`start`].
pub const NOT_TOGETHER: i32 = watch::CODE;

/// Returns a library's version and binary interface: `Open MPI v4.1.4, by Open MPI's ABI`. MPI is
/// not initialized.
///
/// # Errors
/// [`CollectiveError::Setup`] when it cannot be opened or is no MPI.
pub fn probe(options: &MpiOptions) -> Result<MpiLibrary, CollectiveError> {
    let library = find::open(options.library.as_deref(), options.installed.as_deref())?;
    let (calls, abi) = abi::load(library).map_err(find::no_library)?;
    let version = transport::version(&*calls).map_err(CollectiveError::setup)?;
    Ok(MpiLibrary {
        version,
        interface: abi.name,
        library: calls.library().to_string(),
        large_messages: calls.large(),
    })
}

/// An MPI library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpiLibrary {
    /// Its own name and version: `Open MPI v4.1.4`.
    pub version: String,
    /// Its binary interface: `the standard ABI of MPI 5`.
    pub interface: &'static str,
    /// The name or path by which it was opened.
    pub library: String,
    /// Whether a message may have more than 2^31 bytes; else larger ones are split.
    pub large_messages: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_a_number_of_seconds() {
        assert_eq!(seconds(None), Ok(DEADLINE));
        assert_eq!(seconds(Some("2.5")), Ok(Duration::from_millis(2500)));
        for wrong in ["", "soon", "0", "-1", "inf", "NaN"] {
            let error = seconds(Some(wrong)).unwrap_err().to_string();
            assert!(
                error.contains("must be a number of seconds above 0"),
                "{error}"
            );
        }
    }
}
