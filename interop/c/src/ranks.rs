//! Ranks, and the meshes in which they share layers.

use crate::engine::Engine;
use crate::pointers::{Out, borrow, free, optional_text};
use crate::status::{Failure, Status, guard};
use moesaic::Parallel as Groups;
use moesaic::collectives::nccl::{self, Nccl};
use moesaic::collectives::{self, Collectives, Communicator, mpi, threads};
use moesaic::mesh::{Placement, SharedExperts, TokenScope};
use std::ffi::{c_char, c_int};
use std::path::PathBuf;
use std::time::Duration;

/// One rank's end of a group of ranks. One thread uses it at a time.
pub struct World(Group);

enum Group {
    Messages(Communicator),
    Nccl(Box<Nccl>),
}

impl Group {
    fn collectives(&mut self) -> &mut dyn Collectives {
        match self {
            Group::Messages(group) => group,
            Group::Nccl(group) => &mut **group,
        }
    }

    fn shared(&self) -> &dyn Collectives {
        match self {
            Group::Messages(group) => group,
            Group::Nccl(group) => &**group,
        }
    }
}

/// The sizes of a mesh. `ep * expert_tp * dp` is the number of ranks; 0 stands for 1.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Parallel {
    /// The number of groups that share the experts.
    pub ep: usize,
    /// The number of tensor-parallel shards of an expert.
    pub expert_tp: usize,
    /// The number of groups that hold all experts.
    pub dp: usize,
    /// Not 0: shared experts are sharded as the others are; 0: each rank has them whole.
    pub shard_shared: c_int,
    /// Not 0: losses, capacities and selections see the tokens of all ranks; 0: the rank's own.
    pub world_scope: c_int,
    /// The experts of each group, as "0-2 | 3-5,+2"; NULL is equal contiguous parts.
    pub placement: *const c_char,
}

/// A rank's place among those that share layers.
pub struct Mesh {
    pub(crate) mesh: moesaic::Mesh,
}

fn deadline(seconds: f64) -> Result<Option<Duration>, Failure> {
    match seconds {
        0.0 => Ok(None),
        seconds if seconds > 0.0 && seconds < 1e9 => Ok(Some(Duration::from_secs_f64(seconds))),
        seconds => {
            let problem = format!("is {seconds}, expected seconds above 0, or 0 for the default");
            Err(Failure::argument("deadline", problem))
        }
    }
}

/// Makes the ranks of a group of `size` threads of this process: writes `size` handles to `worlds`,
/// one for each thread. `deadline` is in seconds, of each exchange; 0 is a minute.
///
/// # Safety
/// `engine` is live, `worlds` has room for `size` handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_world_threads(
    engine: *const Engine,
    size: usize,
    deadline: f64,
    worlds: *mut *mut World,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let engine = unsafe { borrow(engine, "engine") }?;
        let possible = threads::check_size(size);
        possible.map_err(|error| Failure::argument("size", format!("is {size}: {error}")))?;
        if worlds.is_null() {
            return Err(Failure::Null("worlds"));
        }
        let deadline = self::deadline(deadline)?;
        for (rank, transport) in threads::world(size).into_iter().enumerate() {
            let device = engine.engine.device().clone();
            let group = Communicator::new(Box::new(transport), device);
            let group = group.with_deadline(deadline.unwrap_or(collectives::DEADLINE));
            // SAFETY: the caller vouches for the room.
            let place = unsafe { Out::handle(worlds.add(rank)) }?;
            place.give(World(Group::Messages(group)));
        }
        Ok(())
    })
}

/// Joins the ranks that a launcher has started, by `start`, which takes the path of the library and
/// the deadline of each exchange.
///
/// # Safety
/// As moesaic_world_mpi.
unsafe fn join(
    engine: *const Engine,
    library: *const c_char,
    deadline: f64,
    out: *mut *mut World,
    start: impl FnOnce(&Engine, Option<PathBuf>, Option<Duration>) -> Result<Group, moesaic::Error>,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, engine, library) = unsafe {
            let (out, engine) = (Out::handle(out)?, borrow(engine, "engine")?);
            (out, engine, optional_text(library, "library")?)
        };
        let deadline = self::deadline(deadline)?;
        out.give(World(start(engine, library.map(PathBuf::from), deadline)?));
        Ok(())
    })
}

/// Joins the ranks that `mpirun` or `srun` has started: each is a process. Call it once per
/// process, before other threads use MPI. `library` is the path of the MPI library; NULL searches.
/// `deadline` is in seconds, for the start and for each exchange; 0 is MOESAIC_DEADLINE, else a
/// minute.
///
/// # Safety
/// `engine` is live, `library` is NULL or ends in NUL; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_world_mpi(
    engine: *const Engine,
    library: *const c_char,
    deadline: f64,
    out: *mut *mut World,
) -> Status {
    let start = |engine: &Engine, library, deadline| {
        let options = mpi::MpiOptions {
            library,
            deadline,
            ..mpi::MpiOptions::default()
        };
        let group = mpi::start(&options, engine.engine.device().clone())?;
        Ok(Group::Messages(group))
    };
    // SAFETY: the caller vouches for its pointers.
    unsafe { join(engine, library, deadline, out, start) }
}

/// Joins the ranks that a launcher has started, with one GPU each, over NCCL or RCCL. `library` is
/// the path of the library; NULL searches. `deadline` as for moesaic_world_mpi.
///
/// # Safety
/// As moesaic_world_mpi.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_world_nccl(
    engine: *const Engine,
    library: *const c_char,
    deadline: f64,
    out: *mut *mut World,
) -> Status {
    let start = |engine: &Engine, library, deadline| {
        let options = nccl::NcclOptions {
            library,
            deadline,
            ..nccl::NcclOptions::default()
        };
        Ok(Group::Nccl(Box::new(engine.engine.nccl(options)?)))
    };
    // SAFETY: the caller vouches for its pointers.
    unsafe { join(engine, library, deadline, out, start) }
}

/// Writes this rank's number and the number of ranks.
///
/// # Safety
/// `world` is live; `rank` and `size` are valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_world_rank(
    world: *const World,
    rank: *mut usize,
    size: *mut usize,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (world, rank, size) = unsafe {
            let (rank, size) = (Out::new(rank, "rank")?, Out::new(size, "size")?);
            (borrow(world, "world")?, rank, size)
        };
        rank.set(world.0.shared().rank());
        size.set(world.0.shared().size());
        Ok(())
    })
}

/// Ends a group in good order and frees this rank's end, also where it fails. All ranks call it,
/// after they have freed their layers and meshes.
///
/// # Safety
/// `world` is live, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_world_finish(world: *mut World) -> Status {
    guard(|| {
        if world.is_null() {
            return Err(Failure::Null("world"));
        }
        // SAFETY: the caller vouches for it, and uses it no more.
        let World(group) = *unsafe { Box::from_raw(world) };
        let call = collectives::Call::new("end");
        let done = match group {
            Group::Messages(group) => group.finish(&call),
            Group::Nccl(group) => group.finish(&call),
        };
        Ok(done.map_err(moesaic::Error::from)?)
    })
}

/// Leaves a group at once, so that operations of the others fail; NULL is allowed. For a rank that
/// cannot go on; moesaic_world_finish is the good end.
///
/// # Safety
/// `world` is NULL or live, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_world_free(world: *mut World) {
    // SAFETY: the caller vouches for it.
    unsafe { free(world) }
}

/// Reads a placement of experts on the groups of a mesh.
fn placed(text: &str, groups: &Groups) -> Result<Placement, Failure> {
    let read = text.parse::<Placement>().and_then(|placement| {
        placement.check(groups, placement.experts())?;
        Ok(placement)
    });
    read.map_err(|error| Failure::argument("placement", error))
}

/// Makes the groups of a mesh. All ranks call it with the same sizes. Layers are made on it by
/// moesaic_layer_open, with the engine of the world. Free it by moesaic_mesh_free.
///
/// # Safety
/// `world` is live and used by no other thread meanwhile, `parallel` is valid; `out` is valid for a
/// write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_mesh_open(
    world: *mut World,
    parallel: *const Parallel,
    out: *mut *mut Mesh,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, world, parallel) = unsafe {
            let world = world.as_mut().ok_or(Failure::Null("world"))?;
            (Out::handle(out)?, world, borrow(parallel, "parallel")?)
        };
        // SAFETY: as above.
        let placement = unsafe { optional_text(parallel.placement, "placement") }?;
        let groups = Groups {
            ep: parallel.ep.max(1),
            expert_tp: parallel.expert_tp.max(1),
            dp: parallel.dp.max(1),
            shared: match parallel.shard_shared {
                0 => SharedExperts::Whole,
                _ => SharedExperts::Sharded,
            },
        };
        // Refused before ranks exchange anything: the others would wait for this one otherwise.
        let placement = placement.map(|text| placed(text, &groups)).transpose()?;
        let mesh = moesaic::Mesh::new(world.0.collectives(), groups)?;
        let mesh = match parallel.world_scope {
            0 => mesh,
            _ => mesh.over(TokenScope::World),
        };
        let mesh = match placement {
            None => mesh,
            Some(placement) => mesh.placed(&placement)?,
        };
        out.give(Mesh { mesh });
        Ok(())
    })
}

/// Frees a mesh; NULL is allowed. Layers made on it stay.
///
/// # Safety
/// `mesh` is NULL or live, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_mesh_free(mesh: *mut Mesh) {
    // SAFETY: the caller vouches for it.
    unsafe { free(mesh) }
}
