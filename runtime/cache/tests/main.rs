//! Tests of the store, one binary: each that is linked costs seconds.

mod common;
mod damage;
mod packs;
mod processes;
mod store;
mod tuned;
