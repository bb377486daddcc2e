//! `moesaic-probe --device cuda`: compares the tables of the simulators with a
//! device, and keeps the results.

use clap::Parser;
use moesaic_probe::command::{Arguments, main as command};
use std::process::ExitCode;

fn main() -> ExitCode {
    command(&Arguments::parse())
}
