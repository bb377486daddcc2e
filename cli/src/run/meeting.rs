//! A meeting of processes before any file is read. A process that cannot take part tells the
//! others, which would otherwise wait for it until their deadline.

use crate::failure::{Failure, Result};
use moesaic::EngineError;
use moesaic::collectives::topology::host_name;
use moesaic::collectives::{Call, Collectives, Communicator, mpi};
use moesaic::cpu::CpuDevice;
use moesaic::target::Device;
use moesaic::toolchain::{self, Registry};
use std::cell::RefCell;
use std::sync::Arc;

/// The ranks of a launcher, until all of them are ready.
pub struct RankMeeting {
    world: RefCell<Option<Communicator>>,
}

/// Returns the call of the readiness exchange, which must have the same name on all ranks.
fn call() -> Call {
    Call::new("whether all ranks can begin")
}

impl RankMeeting {
    /// Begins MPI. Its messages need no device yet; [`Communicator::on_device`] sets the layer's
    /// device later.
    pub fn start() -> Result<RankMeeting> {
        let options = options()?;
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new());
        let world = mpi::start(&options, device).map_err(Failure::input)?;
        Ok(RankMeeting {
            world: RefCell::new(Some(world)),
        })
    }

    /// Reports that this rank is ready, and waits for the other ranks.
    ///
    /// # Errors
    /// Returns the reasons of the ranks that cannot begin.
    pub fn all_ready(&self) -> Result<Communicator> {
        let world = self.world.borrow_mut().take();
        let mut world = world.expect("ranks begin once");
        let said = world
            .gather_bytes(&[], &call())
            .map_err(EngineError::from)?;
        let missing: Vec<String> = said
            .into_iter()
            .filter(|said| !said.is_empty())
            .map(|said| String::from_utf8_lossy(&said).into_owned())
            .collect();
        if missing.is_empty() {
            return Ok(world);
        }
        // A launcher ends all ranks when the first one ends, so wait until every rank knows the
        // reason.
        let _ = world.finish(&Call::new("nothing has run"));
        Err(Failure::input(missing.join("\n")).hint("nothing has run"))
    }

    /// Tells the other ranks that this one cannot take part, if they still wait for it.
    pub fn give_up(&self, failure: &Failure) {
        let Some(mut world) = self.world.borrow_mut().take() else {
            return;
        };
        let (rank, host, why) = (world.rank(), host_name(), &failure.message);
        let words = format!("rank {rank} on {host} cannot take part: {why}");
        let told = world.gather_bytes(words.as_bytes(), &call());
        if told.is_ok() {
            let _ = world.finish(&Call::new("nothing has run"));
        }
    }
}

/// Returns MPI options that fall back to the library from `toolchain install mpi`.
pub fn options() -> Result<mpi::MpiOptions> {
    let registry = Registry::open()?;
    Ok(mpi::MpiOptions {
        installed: toolchain::mpi(&registry).map(|found| found.library),
        ..mpi::MpiOptions::default()
    })
}
