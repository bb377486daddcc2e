//! Tests of the interpreter, one binary: each that is linked costs seconds.

mod arithmetic;
mod checks;
mod common;
mod floats;
mod hopper;
mod layers;
mod routing;
