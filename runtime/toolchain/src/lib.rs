//! Where compilers and MPI come from.
//!
//! A machine's own compilers are used when it has them. Where it has none,
//! [`install`] fetches vendor wheels with pip into the cache directory,
//! checks that they work, and registers them. [`nvrtc`], [`rocm`] and
//! [`c`] open a compiler by what the registry and the machine offer, and
//! [`doctor`] says what was found and what can be done about the rest.
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

pub use doctor::{Finding, doctor};
pub use error::ToolchainError;
pub use install::{Step, install};
pub use open::{InstalledMpi, c, mpi, nvrtc, rocm};
pub use package::{Kind, KindError};
pub use registry::{Registered, Registry};
