//! The compilers and MPI libraries of this machine.
//!
//! moesaic uses a machine's own compilers if it has them. If not, [`install`] fetches vendor wheels
//! with pip into the cache directory, checks that they work, and registers them. [`nvrtc`],
//! [`rocm`] and [`c`] open a compiler from the registry or the machine. [`doctor`] reports the
//! tools it found and how to get the rest.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

mod check;
mod doctor;
mod error;
mod install;
mod open;
mod package;
mod pip;
mod registry;
#[doc(hidden)]
pub mod testing;

pub use doctor::{DoctorFinding, doctor};
pub use error::ToolchainError;
pub use install::{InstallStep, install};
pub use open::{InstalledMpi, c, mpi, nvrtc, rocm};
pub use package::{KindError, ToolKind};
pub use registry::{Registered, Registry};
