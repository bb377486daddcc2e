//! Processes that come together before any file is read, so that one that cannot take part
//! tells the others, which would wait for it until their deadline.

use crate::failure::{Failure, Result};
use moesaic::EngineError;
use moesaic::collectives::topology::host_name;
use moesaic::collectives::{Call, Collectives, Communicator, mpi};
use moesaic::cpu::CpuDevice;
use moesaic::target::Device;
use moesaic::toolchain::{self, Registry};
use std::cell::RefCell;
use std::sync::Arc;

/// The ranks of a launcher, until all of them can begin.
pub struct Meeting {
    world: RefCell<Option<Communicator>>,
}

/// Both ends of what ranks say have to be called the same.
fn call() -> Call {
    Call::new("whether all ranks can begin")
}

impl Meeting {
    /// Begins MPI. Its letters need no device; [`Communicator::on_device`] gives it the
    /// layer's later.
    pub fn start() -> Result<Meeting> {
        let options = options()?;
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new());
        let world = mpi::start(&options, device).map_err(Failure::input)?;
        Ok(Meeting {
            world: RefCell::new(Some(world)),
        })
    }

    /// Says that this rank can begin, and waits for the others to say so.
    ///
    /// # Errors
    /// The reasons of the ranks that cannot begin.
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
        // Launchers end the others when the first ends: by then all have found it.
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

/// With the library that `toolchain install mpi` has brought, if nothing nearer is there.
pub fn options() -> Result<mpi::Options> {
    let registry = Registry::open()?;
    Ok(mpi::Options {
        installed: toolchain::mpi(&registry).map(|found| found.library),
        ..mpi::Options::default()
    })
}
