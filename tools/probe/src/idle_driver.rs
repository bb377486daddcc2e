//! A CUDA driver that does nothing, so that the remaining time of a call is the
//! host's.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::{env, fs, io};

/// Source of the driver.
const TEXT: &str = include_str!("idle_cuda.c");

/// The variable of a program that was started with the driver.
const HERE: &str = "MOESAIC_IDLE_DRIVER";

/// Returns the command that starts this program again with the driver, which is
/// written to `folder`.
///
/// # Errors
/// There is no C compiler `cc`, or the folder takes no files.
pub fn again(folder: &Path) -> io::Result<Command> {
    let source = folder.join("idle_cuda.c");
    fs::write(&source, TEXT)?;
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-shared", "-fPIC", "-w", "-o"])
        .arg(folder.join("libcuda.so.1"))
        .arg(source);
    match cc.status()? {
        status if status.success() => {}
        status => return Err(io::Error::other(format!("cc: {status}"))),
    }
    let mut path = OsString::from(folder);
    if let Some(others) = env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(others);
    }
    let mut program = Command::new(env::current_exe()?);
    program.env("LD_LIBRARY_PATH", path).env(HERE, "1");
    Ok(program)
}

/// Returns true if this program was started with the driver.
pub fn is_here() -> bool {
    env::var_os(HERE).is_some()
}
