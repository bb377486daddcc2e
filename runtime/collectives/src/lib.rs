//! Collective operations on device buffers, between the ranks of a group.
//!
//! Layers call [`Collectives`]: all-to-all, all-gather, reduce-scatter, all-reduce, broadcast,
//! point-to-point messages, split, barrier. A call starts an operation and returns without
//! waiting. Every operation has a number and a deadline, and ends on every rank, with a result or
//! with an error. Results are the same bytes in every run, because sums are taken in rank order.
//!
//! An operation is a plan, messages and copies as data ([`schedules`]): a pure function of ranks and
//! sizes. A [`Communicator`] runs plans over any [`Transport`]. A transport only carries eager and
//! rendezvous messages: [`threads`] connects threads of one process, [`mpi`] connects processes
//! under any `mpirun`. [`nccl`] runs the same plans on a GPU's stream.
//!
//! ```
//! use moesaic_collectives::{Call, Collectives, CommElement, Reduction, Slice, threads};
//! use moesaic_cpu::CpuDevice;
//! use std::sync::Arc;
//!
//! let results = threads::run(3, |_| Ok(Arc::new(CpuDevice::new())), |mut world| {
//!     let device = Arc::clone(world.device());
//!     let buffer = Arc::new(device.alloc(4)?);
//!     device.upload(&[world.rank() as u8 + 1; 4], &buffer, 0)?;
//!     let data = Slice::whole(&buffer, CommElement::U8);
//!     let call = Call::new("load of experts");
//!     world.all_reduce(&data, &data, Reduction::Sum, &call)?.wait()?;
//!     let mut sums = [0; 4];
//!     device.download(&buffer, 0, &mut sums)?;
//!     world.finish(&Call::new("end"))?;
//!     Ok::<_, Box<dyn std::error::Error + Send + Sync>>(sums)
//! })?;
//! for result in results {
//!     assert_eq!(result.unwrap().unwrap(), [6; 4]);
//! }
//! # Ok::<(), moesaic_collectives::CollectiveError>(())
//! ```
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without notice.

#![warn(missing_debug_implementations)]

mod api;
mod checks;
mod communicator;
mod core;
mod eager;
mod error;
mod groups;
mod handle;
mod hash;
mod heartbeat;
mod hierarchical;
mod launcher;
pub mod measure;
mod memory;
pub mod mpi;
pub mod nccl;
mod operation;
mod progress_thread;
mod reduce;
mod slice;
mod sub_group;
pub mod threads;
pub mod topology;
pub mod transport;
mod world;

pub use api::{Call, Collectives, Transfer};
pub use communicator::{Communicator, DEADLINE};
pub use error::{CollectiveError, ErrorSite, InvalidReason, MeetingError, Missing, SetupError};
pub use handle::Handle;
pub use heartbeat::with_heartbeat;
pub use launcher::RankLauncher;
pub use moesaic_dist::schedules;
pub use moesaic_dist::schedules::{Algorithm, CommElement, Reduction};
pub use moesaic_dist::{Levels, MOST_LEVELS, NodeRank, NodeShape};
pub use progress_thread::ProgressThread;
pub use slice::Slice;
pub use topology::{Topology, agree};
pub use transport::{Transport, TransportError};
pub use world::World;
