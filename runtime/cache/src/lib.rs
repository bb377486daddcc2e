//! The content-addressed kernel store and its packs.
//!
//! A [`KernelKey`] is a hash of everything that can change a kernel's binary. A [`Store`] keeps one file
//! per kernel under its key, and the source beside it for you to read:
//!
//! ```text
//! <cache>/v1/3f/3fa0….kernel    binary, report and entries, with a hash over all of it
//! <cache>/v1/3f/3fa0….cu        the source, in its own language
//! <cache>/v1/tuned/…            sizes that were measured to be best on a machine
//! <cache>/v1/facts/…            small remembered facts, such as compiler versions
//! <cache>/v1/locks/…            one advisory lock per kernel being compiled
//! ```
//!
//! The cache never turns a working layer into a failing one: a damaged or unreadable entry is a
//! miss, and a store that cannot write reports that and goes on. Only its user may be able to write
//! to it, because a hit is loaded as code: the hash detects damage, not forgery.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

#![warn(missing_debug_implementations)]

mod error;
mod facts;
mod fetch;
mod files;
mod flights;
mod format;
mod hash;
mod home;
mod key;
mod layout;
mod lock;
#[cfg(feature = "packs")]
mod pack;
mod stats;
mod store;
mod tuned;
mod upkeep;
mod version;

#[cfg(feature = "packs")]
pub use error::PackError;
pub use error::{FetchError, StoreError};
pub use fetch::{Fetched, KernelOrigin, KernelRequest};
pub use format::{KernelInfo, StoredKernel, hash_source};
pub use home::{NoHome, home};
pub use key::{KernelKey, KeyParts, NotAKey};
#[cfg(feature = "packs")]
pub use pack::{Exported, Imported, PackKernel, PackList, list_pack};
pub use stats::StoreStats;
pub use store::{PATIENCE, Store};
pub use tuned::{Bucket, Tuned, TunedMachine};
pub use upkeep::{Bad, Listed, OnBad, PruneRule, Pruned, Verified};
pub use version::FORMAT_VERSION;
