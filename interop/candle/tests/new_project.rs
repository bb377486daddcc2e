//! A project as a new user of the op makes it, outside every workspace: `cargo new`,
//! `cargo add`, and `examples/train.rs` as its program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn here() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Runs cargo in a folder and gives what it prints. The profile is that of this crate, and so is
/// the folder of what is built: candle is not compiled twice.
fn cargo(folder: &Path, words: &[&str]) -> String {
    let output = Command::new(env!("CARGO"))
        .args(words)
        .current_dir(folder)
        .env("CARGO_TARGET_DIR", here().join("target"))
        .env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only")
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", "0")
        .env_remove("RUSTFLAGS")
        .output()
        .expect("cargo runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo {words:?}:\n{said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A project with the dependencies of a program that trains a layer in candle, in the versions
/// that this crate is tested with.
fn new_project(folder: &Path) -> PathBuf {
    cargo(
        folder,
        &["new", "--quiet", "--vcs", "none", "candle_experts"],
    );
    let project = folder.join("candle_experts");
    let add = ["add", "--quiet", "--offline"];
    for path in [here(), here().join("../..")] {
        let path = path.to_str().expect("a path in UTF-8");
        cargo(&project, &[&add[..], &["--path", path]].concat());
    }
    let candle = ["candle-core@0.11", "--no-default-features"];
    cargo(&project, &[&add[..], &candle[..]].concat());
    fs::copy(here().join("Cargo.lock"), project.join("Cargo.lock")).expect("it can be copied");
    project
}

#[test]
fn a_new_project_trains_the_op() {
    let folder = tempfile::tempdir().unwrap();
    let project = new_project(folder.path());
    let program = here().join("examples/train.rs");
    fs::copy(program, project.join("src/main.rs")).unwrap();
    let debug = "profile.dev.package.\"*\".debug=false";
    let printed = cargo(
        &project,
        &["run", "--quiet", "--offline", "--config", debug],
    );
    cargo(
        &project,
        &[
            "clean",
            "--quiet",
            "--offline",
            "--package",
            "candle_experts",
        ],
    );

    let evaluated = |line: Option<&str>| -> f32 {
        let words = line.into_iter().flat_map(str::split_whitespace);
        let value = words.skip_while(|word| *word != "evaluated").nth(1);
        value
            .unwrap_or_else(|| panic!("{printed}"))
            .parse()
            .unwrap()
    };
    let mut lines = printed.lines();
    let (first, last) = (evaluated(lines.next()), evaluated(lines.next_back()));
    assert!(last < first / 2.0, "{printed}");
}
