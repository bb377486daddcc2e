//! `moesaic-probe --device cuda`: holds the tables of the simulators against
//! a device, and keeps what came out.

use clap::Parser;
use moesaic_probe::command::{Arguments, main as command};
use std::process::ExitCode;

fn main() -> ExitCode {
    command(&Arguments::parse())
}
