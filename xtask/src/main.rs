//! Project automation. `cargo xtask` lists the commands.

use std::process::{Command, ExitCode};

const USAGE: &str = "\
usage: cargo xtask <command>

  test    install what the tests need (NVRTC and clang, by pip), run every test
  bless   rewrite the golden files after a wanted change
  lint    formatting and clippy, warnings denied
  ci      lint, then test";

fn main() -> ExitCode {
    let command = std::env::args().nth(1).unwrap_or_default();
    let done = match command.as_str() {
        "test" => test(),
        "bless" => bless(),
        "lint" => lint(),
        "ci" => lint().and_then(|()| test()),
        _ => Err(USAGE.to_string()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::from(2)
        }
    }
}

/// Tools first, so that no test has to fetch anything.
fn test() -> Result<(), String> {
    cargo(&[
        "run",
        "--package",
        "moesaic-cli",
        "--",
        "toolchain",
        "install",
        "cuda",
        "rocm",
    ])?;
    cargo(&["test", "--workspace", "--no-fail-fast"])
}

fn bless() -> Result<(), String> {
    run(Command::new(env!("CARGO"))
        .args([
            "test",
            "--package",
            "moesaic",
            "--test",
            "main",
            "golden::emitted",
        ])
        .env("BLESS", "1"))
}

fn lint() -> Result<(), String> {
    cargo(&["fmt", "--all", "--check"])?;
    cargo(&[
        "clippy",
        "--workspace",
        "--all-targets",
        "--",
        "--deny",
        "warnings",
    ])
}

fn cargo(args: &[&str]) -> Result<(), String> {
    run(Command::new(env!("CARGO")).args(args))
}

fn run(command: &mut Command) -> Result<(), String> {
    let words: Vec<_> = command
        .get_args()
        .map(|a| a.to_string_lossy().into_owned())
        .collect();
    let line = format!("cargo {}", words.join(" "));
    eprintln!("+ {line}");
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`{line}` failed: {status}")),
        Err(error) => Err(format!("`{line}` cannot be run: {error}")),
    }
}
