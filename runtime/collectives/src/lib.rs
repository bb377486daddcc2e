//! Ranks that exchange device buffers.
//!
//! [`Collectives`] is what layers call: all-to-all, all-gather, reduce-scatter,
//! all-reduce, broadcast, messages, split, barrier. Every operation is started without
//! waiting, has a number and a deadline, and ends well or as an error on every rank.
//! Results are the same bytes in every run: sums are in the order of ranks.
//!
//! An operation is a [`plan`]: messages and copies as data, a pure function of ranks and
//! sizes. [`Communicator`] runs plans over any [`Engine`], which has to do no more than
//! carry letters and parcels: [`threads`] are ranks of one process, [`mpi`] processes
//! under anybody's `mpirun`.

mod api;
mod checks;
mod communicator;
mod core;
pub mod engine;
mod error;
mod handle;
mod hash;
mod letter;
mod memory;
pub mod mpi;
mod operation;
pub mod plan;
mod reduce;
mod shape;
mod slice;
pub mod threads;
pub mod topology;
mod world;

pub use api::{Algorithm, Call, Collectives, Transfer};
pub use communicator::{Communicator, DEADLINE};
pub use engine::Engine;
pub use error::{At, CollectiveError, Missing};
pub use handle::Handle;
pub use reduce::Reduction;
pub use shape::NodeShape;
pub use slice::{Element, Slice};
pub use topology::{Topology, agree};
pub use world::{Launcher, World};
