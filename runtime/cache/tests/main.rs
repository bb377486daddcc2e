//! Tests of the store in one binary, because linking each binary costs seconds.

mod common;
mod damage;
mod packs;
mod processes;
mod store;
mod tuned;
