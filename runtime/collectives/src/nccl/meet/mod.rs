//! The meeting of ranks that no other transport connects: rank 0 collects the card of every rank
//! and sends all cards to everyone, once. Nothing stays open after that.

mod file;
mod tcp;

use crate::world::{RankLauncher, World};
use crate::{CollectiveError, SetupError, hash};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// The meeting point of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meeting {
    /// MPI, which stays open to compare operations.
    Mpi,
    /// A folder that all ranks see.
    Folder(PathBuf),
    /// The address and port of rank 0, which listens there until all have come.
    Address(String, u16),
    /// A port of this machine, where all ranks run.
    Loopback(u16),
    /// No meeting: there is one rank.
    Alone,
}

/// The largest card in bytes.
const CARD_BYTES: usize = 1 << 16;
/// The additional time for each rank, because rank 0 answers one after the other.
const PER_RANK: Duration = Duration::from_millis(20);

impl Meeting {
    /// Reads variables: `MOESAIC_RENDEZVOUS`, a folder; else MPI under its launchers, including
    /// `srun --mpi=pmix` and `--mpi=pmi2`; else torchrun's `MASTER_ADDR` and `MASTER_PORT`. Empty
    /// values count as unset.
    ///
    /// # Errors
    /// [`CollectiveError::Setup`] when no variable is set, or a port is no number.
    pub fn from_variables(
        world: &World,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Meeting, CollectiveError> {
        if world.size == 1 {
            return Ok(Meeting::Alone);
        }
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        if let Some(folder) = variable("MOESAIC_RENDEZVOUS") {
            return Ok(Meeting::Folder(folder.into()));
        }
        // MPI wins even where torchrun's variables are set as well.
        let mpi = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"];
        if mpi.into_iter().any(|name| variable(name).is_some()) || world.is_task_of_pmix(variable) {
            return Ok(Meeting::Mpi);
        }
        let (address, port) = (variable("MASTER_ADDR"), variable("MASTER_PORT"));
        let (Some(address), Some(port)) = (address, port) else {
            return match world.launcher {
                Some(RankLauncher::Slurm) => Ok(Meeting::Mpi),
                _ => Err(CollectiveError::setup(SetupError::NoMeeting)),
            };
        };
        let wrong = |_| {
            CollectiveError::setup(SetupError::Variable {
                name: "MASTER_PORT".to_string(),
                value: port.clone(),
                expected: "a port",
            })
        };
        let port: u16 = port.trim().parse().map_err(wrong)?;
        // torchrun's own agent may be listening at that port; the next one is ours then.
        let agent_store = variable("TORCHELASTIC_USE_AGENT_STORE");
        let port = if agent_store.is_some_and(|text| text.eq_ignore_ascii_case("true")) {
            port.wrapping_add(1).max(1024)
        } else {
            port
        };
        let local = variable("LOCAL_WORLD_SIZE").and_then(|text| text.trim().parse().ok());
        if local == Some(world.size) {
            Ok(Meeting::Loopback(port))
        } else {
            Ok(Meeting::Address(address, port))
        }
    }
}

/// Variables that are equal on all ranks of a job and differ between jobs.
const JOB: [&str; 10] = [
    "MOESAIC_JOB",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
];

/// Returns a number of this job, so that files and processes of others are not mistaken for ours.
/// It prevents accidents, not attacks.
pub fn token(job: Option<&str>, size: usize, variable: impl Fn(&str) -> Option<String>) -> u64 {
    /// The number of worlds of this process.
    static WORLDS: AtomicU64 = AtomicU64::new(0);
    let mut parts = vec![size.to_string()];
    match job {
        Some(job) => parts.push(job.to_string()),
        None => {
            parts.extend(JOB.iter().filter_map(|name| variable(name)));
            // All ranks create their worlds in the same order, so the count matches across ranks.
            parts.push(WORLDS.fetch_add(1, Ordering::SeqCst).to_string());
        }
    }
    let parts: Vec<&[u8]> = parts.iter().map(|part| part.as_bytes()).collect();
    hash::of(&parts)
}

/// A rank that is joining the others.
pub struct Guest {
    pub rank: usize,
    pub size: usize,
    pub token: u64,
    pub card: Vec<u8>,
    pub until: Instant,
    /// A number that no other rank has, nor this rank in another run.
    nonce: u64,
    start: Instant,
    random: u64,
}

impl Guest {
    pub fn new(world: (usize, usize), token: u64, card: Vec<u8>, deadline: Duration) -> Guest {
        let (rank, size) = world;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let clock = now.map_or(0, |now| now.as_nanos() as u64);
        let own = [clock, u64::from(std::process::id()), rank as u64];
        let parts: Vec<[u8; 8]> = own.iter().map(|number| number.to_le_bytes()).collect();
        let parts: Vec<&[u8]> = parts.iter().map(|part| &part[..]).collect();
        let start = Instant::now();
        Guest {
            rank,
            size,
            token,
            card,
            until: start + deadline + PER_RANK * size as u32,
            start,
            nonce: hash::of(&parts),
            random: hash::of(&parts) | 1,
        }
    }

    /// Returns the cards of all ranks in rank order.
    pub fn gather(mut self, meeting: &Meeting) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let gathered = match meeting {
            Meeting::Folder(folder) => file::gather(&mut self, folder),
            Meeting::Address(address, port) => tcp::gather(&mut self, address, *port),
            Meeting::Loopback(port) => tcp::gather(&mut self, "127.0.0.1", *port),
            Meeting::Mpi | Meeting::Alone => Ok(vec![self.card]),
        };
        gathered.map_err(CollectiveError::setup)
    }

    fn late(&self) -> bool {
        Instant::now() > self.until
    }

    fn waited(&self) -> Duration {
        self.start.elapsed()
    }

    /// Pauses for 1 to 2 times `least`, at random, so that ranks do not retry in step.
    fn pause(&mut self, least: Duration) {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let part = (self.random % 1000) as f64 / 1000.0;
        std::thread::sleep(least.mul_f64(1.0 + part));
    }

    /// Lists missing ranks for errors of rank 0.
    fn missing(&self, there: impl Fn(usize) -> bool) -> String {
        let missing: Vec<String> = (0..self.size)
            .filter(|rank| !there(*rank))
            .map(|rank| rank.to_string())
            .collect();
        const SHOWN: usize = 8;
        let more = match missing.len() {
            ..=SHOWN => String::new(),
            many => format!(" and {} more", many - SHOWN),
        };
        let shown = missing[..missing.len().min(SHOWN)].join(", ");
        format!("rank {shown}{more}")
    }
}

/// Encodes parts, each behind its length.
fn join(parts: &[Vec<u8>]) -> Vec<u8> {
    let one = |part: &Vec<u8>| [&(part.len() as u32).to_le_bytes()[..], part].concat();
    parts.iter().flat_map(one).collect()
}

fn split(mut bytes: &[u8], parts: usize) -> Option<Vec<Vec<u8>>> {
    let mut list = Vec::new();
    for _ in 0..parts {
        let (length, rest) = bytes.split_first_chunk()?;
        let (part, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        list.push(part.to_vec());
        bytes = rest;
    }
    bytes.is_empty().then_some(list)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn meeting(rank: &str, variables: &str) -> Result<Meeting, String> {
        let all = format!("{rank} {variables}");
        let lookup = |name: &str| {
            let mut pairs = all
                .split_whitespace()
                .filter_map(|pair| pair.split_once('='));
            pairs
                .find(|(key, _)| *key == name)
                .map(|(_, value)| value.to_string())
        };
        let world = World::from_variables(lookup).unwrap().unwrap();
        Meeting::from_variables(&world, lookup).map_err(|error| error.to_string())
    }

    #[test]
    fn variables_say_where_ranks_meet() {
        let torch = "RANK=1 WORLD_SIZE=4 MASTER_ADDR=node7";
        let address = |port| Ok(Meeting::Address("node7".to_string(), port));
        assert_eq!(meeting(torch, "MASTER_PORT=29500"), address(29500));
        let agent = "MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True";
        assert_eq!(meeting(torch, agent), address(29501));
        let local = "MASTER_PORT=29500 LOCAL_WORLD_SIZE=4";
        assert_eq!(meeting(torch, local), Ok(Meeting::Loopback(29500)));
        let folder = meeting(torch, "MASTER_PORT=1 MOESAIC_RENDEZVOUS=/shared/x");
        assert_eq!(folder, Ok(Meeting::Folder("/shared/x".into())));
        assert_eq!(meeting("PMI_RANK=0 PMI_SIZE=2", ""), Ok(Meeting::Mpi));
        let both = "MASTER_PORT=1 PMI_RANK=1 PMI_SIZE=4";
        assert_eq!(meeting(torch, both), Ok(Meeting::Mpi));
        assert_eq!(meeting("RANK=0 WORLD_SIZE=1", ""), Ok(Meeting::Alone));
        let empty = "MASTER_PORT=29500 MOESAIC_RENDEZVOUS=";
        assert_eq!(meeting(torch, empty), address(29500));
        let nothing = meeting("RANK=0 WORLD_SIZE=2", "").unwrap_err();
        assert!(
            nothing.contains("nothing says where ranks meet"),
            "{nothing}"
        );
        let port = meeting(torch, "MASTER_PORT=high").unwrap_err();
        assert!(port.contains("MASTER_PORT is `high`"), "{port}");
    }

    /// Open MPI's variables are not set before `MPI_Init` where `srun` has started the ranks.
    #[test]
    fn tasks_of_pmix_meet_by_mpi() {
        let task = "SLURM_PROCID=1 SLURM_NTASKS=16 SLURM_STEP_ID=0";
        let pmix = "PMIX_RANK=1 PMIX_NAMESPACE=slurm.pmix.7.0 MASTER_ADDR=node7 MASTER_PORT=29500";
        assert_eq!(meeting(task, pmix), Ok(Meeting::Mpi));
        // A wrapper may set torchrun's variables for each task.
        let wrapped = format!("{task} RANK=1 WORLD_SIZE=16");
        assert_eq!(meeting(&wrapped, pmix), Ok(Meeting::Mpi));
        let address = Ok(Meeting::Address("node7".to_string(), 29500));
        let none = pmix.replace("PMIX_NAMESPACE", "OTHER");
        assert_eq!(meeting(task, &none), address);
        // Ranks of a torchrun inside a task are not SLURM's tasks.
        let inside = "SLURM_PROCID=1 SLURM_NTASKS=2 RANK=8 WORLD_SIZE=16";
        assert_eq!(meeting(inside, pmix), address);
        let one = "SLURM_PROCID=1 SLURM_NTASKS=2 RANK=1 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=x";
        assert_eq!(meeting(one, pmix), address);
    }

    #[test]
    fn jobs_have_different_tokens_and_ranks_the_same() {
        let of = |job: &str| token(Some(job), 4, |_| None);
        assert_eq!(of("17"), of("17"));
        assert_ne!(of("17"), of("18"));
        assert_ne!(of("17"), token(Some("17"), 5, |_| None));
    }

    #[test]
    fn many_ranks_meet_at_one_address_and_the_host_leaves_last() {
        const RANKS: usize = 256;
        let port = TcpListener::bind("127.0.0.1:0").unwrap();
        let meeting = Meeting::Loopback(port.local_addr().unwrap().port());
        drop(port);
        let card = |rank: usize| rank.to_le_bytes().repeat(8);
        let whole: Vec<Vec<u8>> = (0..RANKS).map(card).collect();
        std::thread::scope(|scope| {
            for rank in 0..RANKS {
                let (meeting, whole) = (&meeting, &whole);
                let small = std::thread::Builder::new().stack_size(256 << 10);
                let body = move || {
                    let deadline = Duration::from_secs(20);
                    let guest = Guest::new((rank, RANKS), 7, card(rank), deadline);
                    // The host is late, and so are some of the others.
                    std::thread::sleep(Duration::from_millis(match rank {
                        0 => 200,
                        _ => 3 * (rank as u64 % 100),
                    }));
                    // A host that left before a rank had its answer would fail that rank here.
                    assert_eq!(guest.gather(meeting).unwrap(), *whole);
                };
                small.spawn_scoped(scope, body).unwrap();
            }
        });
    }

    #[test]
    fn more_ranks_have_more_time() {
        let start = Instant::now();
        let until = |size| Guest::new((1, size), 7, Vec::new(), Duration::from_secs(5)).until;
        assert!(until(10_000) > start + Duration::from_secs(200));
        assert!(until(2) < start + Duration::from_secs(6));
    }

    #[test]
    fn parts_read_back() {
        let parts = vec![vec![1, 2], vec![], vec![3]];
        assert_eq!(split(&join(&parts), 3), Some(parts.clone()));
        assert_eq!(split(&join(&parts), 2), None);
        assert_eq!(split(&join(&parts), 4), None);
        assert_eq!(split(&[255, 255, 255, 255], 1), None);
    }
}
