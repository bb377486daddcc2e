//! Tests of the reference, one binary: each that is linked costs seconds.

mod backward;
mod forward;
mod losses;
mod rng;
mod wire;
