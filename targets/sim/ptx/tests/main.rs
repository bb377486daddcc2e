//! Tests of the interpreter in one binary, because linking each costs seconds.

mod arithmetic;
mod checks;
mod common;
mod floats;
mod hopper;
mod layers;
mod routing;
