//! What a command says.

use std::process::{Command, Output};

/// What a command prints, and its exit code.
pub fn said(command: &mut Command) -> (String, Option<i32>) {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().expect("it starts");
    let text = [stdout, stderr].concat();
    (String::from_utf8_lossy(&text).into_owned(), status.code())
}
