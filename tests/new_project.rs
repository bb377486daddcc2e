//! A project as a new user makes it, outside the workspace: `cargo new`, one
//! dependency, the files of examples/new_project.

use crate::tidy::files;
use moesaic_harness::kept::build_folder;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    PathBuf::from(crate::ROOT)
}

/// Runs cargo in a folder and gives what it prints. It builds where it built this test, so that
/// little is compiled twice.
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

/// A project with the dependency, and the workspace's profile and versions of everything.
fn new_project(folder: &Path) -> PathBuf {
    let root = root();
    let path = root.to_str().expect("a path in UTF-8");
    cargo(folder, &["new", "--quiet", "--vcs", "none", "experts"]);
    let project = folder.join("experts");
    let add = ["add", "--quiet", "--offline", "moesaic", "--path", path];
    cargo(
        &project,
        &[&add[..], &["--features", "macros,train"]].concat(),
    );
    cargo(&project, &[&add[..], &["--build"]].concat());
    fs::copy(root.join("Cargo.lock"), project.join("Cargo.lock")).expect("it can be copied");
    let manifest = fs::read_to_string(root.join("Cargo.toml")).expect("it can be read");
    let from = manifest.find("[profile.dev]").expect("it has a profile");
    let to = manifest.find("[profile.release]").expect("another follows");
    let own = project.join("Cargo.toml");
    let text = fs::read_to_string(&own).expect("cargo wrote it");
    fs::write(&own, text + &manifest[from..to]).expect("it can be written");
    project
}

#[test]
fn a_new_project_precompiles_and_trains() {
    let folder = tempfile::tempdir().unwrap();
    let project = new_project(folder.path());
    let kept = root().join("examples/new_project");
    for file in files(&kept, &[".rs", ".toml"]) {
        let inner = file.strip_prefix(&kept).unwrap();
        fs::copy(&file, project.join(inner)).unwrap();
    }
    let printed = cargo(&project, &["run", "--quiet", "--offline"]);
    cargo(
        &project,
        &["clean", "--quiet", "--offline", "--package", "experts"],
    );

    let words: Vec<&str> = printed.split_whitespace().collect();
    let number = |before: &str| -> f32 {
        let at = words.iter().position(|word| *word == before);
        words[at.unwrap_or_else(|| panic!("{printed}")) + 1]
            .parse()
            .unwrap()
    };
    assert!(
        printed.contains("kernels compiled while it ran: 0"),
        "{printed}"
    );
    let (first, unseen) = (number("loss"), number("step,"));
    assert!(unseen < first / 2.0, "{printed}");
}
