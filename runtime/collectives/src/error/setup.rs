//! The reasons a world of ranks cannot be set up.

use crate::launcher::RankLauncher;
use crate::transport::TransportError;
use moesaic_target::{DeviceError, SharedError, SystemError};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// The reason there is no world of ranks, or no longer one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// A world without ranks.
    #[error("a world has at least one rank; 0 were asked for")]
    NoRanks,
    /// More ranks of one process than its processors can run.
    #[error(
        "{asked} ranks as threads of one process are more than its {processors} processors carry \
         while ranks wait for each other: take {most} or fewer, or start ranks as processes, by \
         mpirun, srun or `moesaic launch`"
    )]
    ManyThreads {
        /// The ranks that were asked for.
        asked: usize,
        /// The most that are possible.
        most: usize,
        /// The processors of this process.
        processors: usize,
    },
    /// A rank that its world does not have.
    #[error(
        "rank {rank} of {size} was given{}; ranks go from 0 to one less than their number",
        launcher.map_or(String::new(), |launcher| format!(" by {launcher}"))
    )]
    Rank {
        /// The rank.
        rank: usize,
        /// The number of ranks.
        size: usize,
        /// The launcher whose variables say so.
        launcher: Option<RankLauncher>,
    },
    /// A variable has a value that cannot be read.
    #[error("{name} is `{value}`; it must be {expected}")]
    Variable {
        /// The variable.
        name: String,
        /// Its value.
        value: String,
        /// The accepted values: `a port`.
        expected: &'static str,
    },
    /// A launcher's variable lacks its counterpart.
    #[error("{set} is set and {missing} is not; set both or none")]
    Counterpart {
        /// The variable that is set.
        set: String,
        /// The variable that is missing.
        missing: String,
    },
    /// The variables of two launchers contradict each other.
    #[error(
        "{first} contradict {second}; unset those of the launcher that did not start this process"
    )]
    Contradiction {
        /// The variables of one launcher, in words.
        first: String,
        /// The variables of the other.
        second: String,
    },
    /// Torchrun has started the ranks, and MPI knows of none.
    #[error(
        "torchrun's variables say rank {rank} of {size}, but MPI ({library}) has one rank: these \
         variables alone make no MPI world\n\
         start the ranks by mpirun, srun or `moesaic launch`"
    )]
    TorchrunWithoutMpi {
        /// The rank in the variables.
        rank: usize,
        /// The number of ranks in the variables.
        size: usize,
        /// The MPI library.
        library: String,
    },
    /// The MPI library is not that of the launcher.
    #[error(
        "the launcher ({}) says rank {} of {}, but the library {library} ({transport}) says rank {} \
         of {}: it is not the launcher's\n\
         set MOESAIC_MPI to the library of the MPI whose launcher is used{}",
        launcher.map_or(String::new(), |launcher| launcher.to_string()),
        launched[0], launched[1], found[0], found[1], srun(*launcher)
    )]
    OtherLauncher {
        /// The launcher.
        launcher: Option<RankLauncher>,
        /// Rank and number of ranks by the launcher.
        launched: [usize; 2],
        /// Rank and number of ranks by the library.
        found: [usize; 2],
        /// The library's path.
        library: String,
        /// The library's name and version.
        transport: String,
    },
    /// Open MPI has started the ranks, and the library is another MPI's.
    #[error(
        "Open MPI's mpirun has started this process ({variables}), but the library {library} \
         ({version}) is not Open MPI's: it is not the launcher's\n\
         set MOESAIC_MPI to Open MPI's libmpi.so.40, or start the ranks by the launcher of that \
         library"
    )]
    NotOpenMpi {
        /// The launcher's variables, in words.
        variables: String,
        /// The library's path.
        library: String,
        /// The library's version.
        version: String,
    },
    /// There is no library of MPI, NCCL or RCCL.
    #[error("{source}\n{advice}")]
    NoLibrary {
        /// The libraries that were tried, with their errors.
        source: SharedError,
        /// The library to install, and the variable to set.
        advice: String,
    },
    /// The library is too old.
    #[error("`{library}` is {version}; {oldest} or later is needed\n{advice}")]
    OldLibrary {
        /// The library's path.
        library: String,
        /// Its name and version.
        version: String,
        /// The oldest version that is enough.
        oldest: String,
        /// The library to install, and the variable to set.
        advice: String,
    },
    /// MPI's launcher has started the ranks, and its library is missing.
    #[error(
        "the launcher is MPI's: {source}\n\
         or set MOESAIC_RENDEZVOUS to a folder that all ranks see, to meet without MPI"
    )]
    NoMpi {
        /// The reason MPI cannot be used.
        source: Box<super::CollectiveError>,
    },
    /// The transport failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The device failed.
    #[error(transparent)]
    Device(Box<DeviceError>),
    /// The system refused a thread.
    #[error("no thread to {purpose}: {source}")]
    Thread {
        /// The thread's work: `send heartbeats`.
        purpose: &'static str,
        /// The system's error.
        source: SystemError,
    },
    /// No variable says where ranks meet.
    #[error(
        "nothing says where ranks meet; set MASTER_ADDR and MASTER_PORT, or MOESAIC_RENDEZVOUS to \
         a folder that all ranks see"
    )]
    NoMeeting,
    /// The ranks did not meet.
    #[error(transparent)]
    Meeting(#[from] MeetingError),
    /// A rank runs another version of the program.
    #[error(
        "what rank {rank} says of itself cannot be read: the ranks run different versions of this \
         program"
    )]
    OtherVersion {
        /// The rank.
        rank: usize,
    },
    /// Rank 0 has sent no id for the communicator.
    #[error("rank 0 has sent no id")]
    NoId,
    /// The communicator of a GPU library was not made.
    #[error("rank {rank}: {library}: {source}")]
    Communicator {
        /// This rank.
        rank: usize,
        /// The library's name and version.
        library: String,
        /// Its failure.
        source: TransportError,
    },
    /// [`Communicator::finish`](crate::Communicator::finish) has ended the world.
    #[error("the world was ended by `finish`")]
    Finished,
    /// The world was dropped.
    #[error("the world was dropped without `finish`")]
    Dropped,
    /// The program that sets up the ranks has failed.
    #[error("{0}")]
    Other(#[source] SharedError),
}

impl From<DeviceError> for SetupError {
    fn from(error: DeviceError) -> SetupError {
        SetupError::Device(Box::new(error))
    }
}

/// Returns the option of `srun` by which it speaks a library's process manager.
fn srun(launcher: Option<RankLauncher>) -> &'static str {
    match launcher {
        Some(RankLauncher::Slurm) => {
            "\nsrun has to speak the library's process manager: --mpi=pmix for Open MPI, \
             --mpi=pmi2 for MPICH and Intel MPI"
        }
        _ => "",
    }
}

/// The reason ranks without a transport did not meet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MeetingError {
    /// Rank 0 has not seen all ranks in time.
    #[error("{missing} of {size} did not come to {place} within {:.1} s", waited.as_secs_f64())]
    Missing {
        /// The ranks, in words.
        missing: String,
        /// The number of ranks.
        size: usize,
        /// The folder or the address.
        place: String,
        /// The time since the start.
        waited: Duration,
    },
    /// Ranks came and did not go on in time.
    #[error("{missing} of {size} came to {place} and did not go on within {:.1} s", waited.as_secs_f64())]
    Stuck {
        /// The ranks, in words.
        missing: String,
        /// The number of ranks.
        size: usize,
        /// The folder.
        place: String,
        /// The time since the start.
        waited: Duration,
    },
    /// Rank 0 has not been at the folder.
    #[error(
        "rank 0 has left nothing for rank {rank} in {place} within {:.1} s; all ranks must see the \
         same folder", waited.as_secs_f64()
    )]
    NothingLeft {
        /// This rank.
        rank: usize,
        /// The folder.
        place: String,
        /// The time since the start.
        waited: Duration,
    },
    /// Rank 0 has not answered at its address.
    #[error(
        "rank {rank} was not answered by rank 0 at {place} within {:.1} s: {}; rank 0 must be of \
         the same job", waited.as_secs_f64(),
        last.as_ref().map_or("it has no address", |error| &error.message)
    )]
    NotAnswered {
        /// This rank.
        rank: usize,
        /// The addresses.
        place: String,
        /// The time since the start.
        waited: Duration,
        /// The last attempt's error.
        last: Option<SystemError>,
    },
    /// Rank 0 cannot listen.
    #[error(
        "rank 0 cannot listen at {}: {source}; MASTER_ADDR must be an address of rank 0's machine, \
         and MASTER_PORT free",
        shown(addresses)
    )]
    Listen {
        /// The addresses.
        addresses: Vec<SocketAddr>,
        /// The system's error.
        source: SystemError,
    },
    /// The host's name has no address.
    #[error("MASTER_ADDR `{host}`: {source}")]
    Host {
        /// The name.
        host: String,
        /// The system's error.
        source: SystemError,
    },
    /// A file cannot be written.
    #[error("cannot write `{}`: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: SystemError,
    },
    /// A file is damaged.
    #[error("a file in `{}` is damaged", folder.display())]
    Damaged {
        /// The folder.
        folder: PathBuf,
    },
}

/// Lists addresses.
pub(crate) fn shown(addresses: &[SocketAddr]) -> String {
    let list: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
    list.join(" or ")
}
