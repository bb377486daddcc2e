//! Ranks with a GPU each, over NCCL or RCCL.
//!
//! The library is opened at run time; building needs none. Operations are put on the stream of
//! the rank's device. They run after everything launched before them, later launches see their
//! results, and the host waits only if you ask it to. So a layer may drop the handle and
//! continue, and may capture operations in a graph.
//!
//! The library moves the data. Where there is another transport, MPI or threads, its eager
//! messages compare each operation across ranks: its kind, type and sizes. They name a rank that
//! calls something else or is late. [`Checks::Off`] leaves the comparison out.

mod agree;
mod card;
mod comm;
mod end;
mod find;
mod fold;
mod group;
mod hierarchical;
mod launch;
mod meet;
mod options;
mod split;
mod table;
mod watch;
mod world;

use crate::operation::Group;
use crate::{Call, CollectiveError, Collectives, Communicator, SetupError, TransportError, World};
use comm::Comm;
pub use fold::{Fold, Folding, Kernels, OnHost};
pub use group::Nccl;
pub use meet::Meeting;
use moesaic_kernel::Target;
use moesaic_target::{Device, DeviceError};
pub use options::{Checks, NcclOptions, Sums};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use world::WorldParts;

/// Joins the ranks that a launcher has started, and waits until all have come. Under MPI, its
/// eager messages stay in use to compare operations. Ranks that meet in a folder or at an address
/// do not compare them, as with [`Checks::Off`].
///
/// # Errors
/// The errors of [`over`], [`World::from_environment`] and [`Meeting::from_variables`];
/// [`CollectiveError::Setup`] for ranks that do not come in time.
pub fn start(device: Arc<dyn Device>, options: &NcclOptions) -> Result<Nccl, CollectiveError> {
    let variable = |name: &str| std::env::var(name).ok();
    let world = match options.world {
        Some(world) => world,
        None => World::from_environment()?.map_or_else(|| World::new(0, 1), Ok)?,
    };
    let meeting = match &options.meeting {
        Some(meeting) => meeting.clone(),
        None => Meeting::from_variables(&world, variable)?,
    };
    let deadline = options.deadline()?;
    match meeting {
        Meeting::Mpi => {
            let mpi = crate::mpi::MpiOptions {
                deadline: Some(deadline),
                installed: options.installed_mpi.clone(),
                ..crate::mpi::MpiOptions::default()
            };
            crate::mpi::probe(&mpi).map_err(|error| {
                CollectiveError::setup(SetupError::NoMpi {
                    source: Box::new(error),
                })
            })?;
            let control = crate::mpi::start(&mpi, Arc::clone(&device))?;
            over(control, device, options)
        }
        Meeting::Alone => {
            let alone = crate::threads::world(1).into_iter().next();
            let transport = alone.ok_or_else(|| CollectiveError::setup(SetupError::NoRanks))?;
            let control = Communicator::new(Box::new(transport), Arc::clone(&device));
            over(control, device, options)
        }
        meeting => {
            let begin = Begin::new(world.rank, world.size, device, options)?;
            let token = meet::token(options.job.as_deref(), world.size, variable);
            let ranks = (world.rank, world.size);
            let guest = meet::Guest::new(ranks, token, begin.card()?, deadline);
            let cards = guest.gather(&meeting)?;
            begin.join(&cards, deadline, None)
        }
    }
}

/// Makes a world of GPUs out of ranks that another transport already connects. Waits.
///
/// # Errors
/// [`CollectiveError::Setup`] when there is no library or it is too old;
/// [`CollectiveError::Disagreement`] when ranks have different ones;
/// [`CollectiveError::SharedDevice`] when two ranks share a device; else the errors of
/// [`Collectives::gather_bytes`].
pub fn over(
    mut control: Communicator,
    device: Arc<dyn Device>,
    options: &NcclOptions,
) -> Result<Nccl, CollectiveError> {
    let (rank, size) = (control.rank(), control.size());
    let deadline = options.deadline()?;
    let call = Call::new("NCCL: ranks come together").within(deadline);
    let begin = Begin::new(rank, size, device, options)?;
    let cards = control.gather_bytes(&begin.card()?, &call)?;
    let control = control.with_deadline(deadline).renewed("nccl");
    begin.join(&cards, deadline, Some(control))
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nccl")
            .field("rank", &self.group.rank)
            .field("members", &self.group.members)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

/// A usable library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclLibrary {
    /// Its name and version: `NCCL 2.28.3`.
    pub version: String,
    /// The name or path by which it was opened.
    pub library: String,
}

/// Returns the library for devices of a target, without using a device.
///
/// # Errors
/// [`CollectiveError::Setup`] when it cannot be opened, or is too old.
pub fn probe(target: Target, options: &NcclOptions) -> Result<NcclLibrary, CollectiveError> {
    let api = find::Api::open(options.library.as_deref(), target)?;
    Ok(NcclLibrary {
        version: api.name(),
        library: api.table.library().to_string(),
    })
}

/// A rank before the communicator exists.
struct Begin<'a> {
    rank: usize,
    size: usize,
    api: Arc<find::Api>,
    device: Arc<dyn Device>,
    options: &'a NcclOptions,
}

impl Begin<'_> {
    fn new(
        rank: usize,
        size: usize,
        device: Arc<dyn Device>,
        options: &NcclOptions,
    ) -> Result<Begin<'_>, CollectiveError> {
        let api = find::Api::open(options.library.as_deref(), device.info().target)?;
        Ok(Begin {
            rank,
            size,
            api: Arc::new(api),
            device,
            options,
        })
    }

    /// Returns this rank's introduction.
    fn card(&self) -> Result<Vec<u8>, CollectiveError> {
        let mut id = table::UniqueId([0; table::ID_BYTES]);
        if self.rank == 0 {
            // SAFETY: the pointer is valid for a write.
            let code = unsafe { self.api.table.unique_id(&mut id) };
            if code != table::SUCCESS {
                // SAFETY: null is allowed.
                let message = unsafe { self.api.table.words(code, std::ptr::null_mut()) };
                return Err(CollectiveError::setup(TransportError::Call {
                    function: "ncclGetUniqueId",
                    code,
                    message,
                }));
            }
        }
        let (host, bus) = card::place(self.options.host.as_deref(), &*self.device);
        let card = card::Card {
            library: self.api.name(),
            host,
            bus,
            process: card::process(),
            ordinal: self.ordinal()?,
            id: if self.rank == 0 {
                id.0.to_vec()
            } else {
                Vec::new()
            },
        };
        Ok(card.encode())
    }

    /// Makes the communicator; all ranks call it.
    fn join(
        self,
        cards: &[Vec<u8>],
        deadline: Duration,
        control: Option<Communicator>,
    ) -> Result<Nccl, CollectiveError> {
        let introduced = card::check(cards, self.options.share_device)?;
        self.admit(&introduced.devices)
            .map_err(CollectiveError::setup)?;
        let id = table::UniqueId(introduced.id);
        let comm = Comm::begin(&self.api, id, self.rank, self.size);
        let comm = Arc::new(comm.map_err(CollectiveError::setup)?);
        self.wait_for(&comm, deadline)?;
        let on_host = || -> Arc<dyn Fold> { Arc::new(OnHost::new(&self.device)) };
        let world = world::NcclWorld::new(WorldParts {
            fold: self.options.fold.clone().unwrap_or_else(on_host),
            api: self.api,
            device: self.device,
            sums: self.options.sums,
            checks: self.options.checks,
        })?;
        world.board.add_comm(&comm);
        let group = Group {
            context: 0,
            members: (0..self.size).collect(),
            rank: self.rank,
        };
        Ok(Nccl {
            world: Arc::new(world),
            comm,
            control,
            group: Arc::new(group),
            sequence: 0,
            deadline,
        })
    }

    fn ordinal(&self) -> Result<usize, CollectiveError> {
        let gpu = self.device.streams().map_err(CollectiveError::setup)?;
        Ok(gpu.gpu_info().ordinal)
    }

    /// Prepares the GPU. Between ranks of one process the library reads and writes the operands
    /// themselves, so the other GPUs must reach them. It also uses the GPU that is current on this
    /// thread.
    fn admit(&self, devices: &[usize]) -> Result<(), DeviceError> {
        let gpu = self.device.streams()?;
        let own = gpu.gpu_info().ordinal;
        for peer in devices.iter().filter(|peer| **peer != own) {
            gpu.admit(*peer)?;
        }
        gpu.native_stream().map(drop)
    }

    fn wait_for(&self, comm: &Arc<Comm>, deadline: Duration) -> Result<(), CollectiveError> {
        let start = Instant::now();
        loop {
            let state = comm.enter().map(|entered| entered.settled());
            let source = match state {
                Some(Ok(true)) => return Ok(()),
                Some(Err(error)) => error,
                _ if start.elapsed() > deadline => TransportError::RanksMissing {
                    ranks: self.size,
                    deadline,
                },
                _ => {
                    std::thread::sleep(Duration::from_micros(200));
                    continue;
                }
            };
            // Aborted on a thread of its own, because an abort may take any length of time.
            let own = Arc::clone(comm);
            let _ = std::thread::Builder::new().spawn(move || own.abort());
            return Err(CollectiveError::setup(SetupError::Communicator {
                rank: self.rank,
                library: self.api.name(),
                source,
            }));
        }
    }
}
