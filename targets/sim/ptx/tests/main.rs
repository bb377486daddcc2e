//! Tests of the interpreter, one binary: each that is linked costs seconds.

mod arithmetic;
mod checks;
mod common;
mod floats;
mod hopper;
#[path = "../../../../codegen/emit/tests/kernels/kept/mod.rs"]
mod kept;
mod layers;
#[path = "../../../../codegen/emit/tests/kernels/rig/mod.rs"]
mod rig;
mod routing;
