//! A project as a new user of the op makes it, outside every workspace: `cargo new`,
//! `cargo add`, and `examples/train.rs` as its program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn here() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Where cargo built this test, in `PROFILE/deps` of it.
fn build_folder() -> PathBuf {
    let test = std::env::current_exe().expect("a program knows where it lies");
    let folder = test.ancestors().nth(3).expect("cargo built it");
    folder.to_path_buf()
}

/// Runs cargo in a folder and gives what it prints. It builds where it built this test: candle is
/// not compiled twice.
fn cargo(folder: &Path, words: &[&str]) -> String {
    let output = Command::new(env!("CARGO"))
        .args(words)
        .current_dir(folder)
        .env("CARGO_TARGET_DIR", build_folder())
        .env_remove("RUSTFLAGS")
        .output()
        .expect("cargo runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo {words:?}:\n{said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A project with the dependencies of a program that trains a layer in candle, in the versions
/// and with the profile that this crate is tested with.
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
    // Derives expand by this crate. With the features that Python's macros give it, what the
    // workspace built serves this project, too.
    let derives = ["--build", "syn@3", "--features", "full,visit-mut"];
    cargo(&project, &[&add[..], &derives[..]].concat());
    let workspace = here().join("..");
    fs::copy(workspace.join("Cargo.lock"), project.join("Cargo.lock")).expect("it can be copied");
    let manifest = fs::read_to_string(workspace.join("Cargo.toml")).expect("it can be read");
    let profile = manifest.find("[profile.dev]").expect("it has a profile");
    let own = project.join("Cargo.toml");
    let text = fs::read_to_string(&own).expect("cargo wrote it");
    fs::write(&own, text + &manifest[profile..]).expect("it can be written");
    project
}

#[test]
fn a_new_project_trains_the_op() {
    let folder = tempfile::tempdir().unwrap();
    let project = new_project(folder.path());
    let program = here().join("examples/train.rs");
    fs::copy(program, project.join("src/main.rs")).unwrap();
    let printed = cargo(&project, &["run", "--quiet", "--offline"]);
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
