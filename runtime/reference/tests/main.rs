//! Tests of the reference in one binary, because linking each binary costs seconds.

mod backward;
mod comm_cast;
mod forward;
mod losses;
mod rng;
