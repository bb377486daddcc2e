//! The whole smoke test on the simulator: made, carried to another folder, run without a compiler.

mod said;

use moesaic_toolchain::{ToolKind, testing};
use said::said;
use std::fs;
use std::path::Path;
use std::process::Command;

const PROGRAM: &str = env!("CARGO_BIN_EXE_moesaic-gpu-smoke");
const DEVICE: &str = "sim:sm_90a";

fn make(folder: &Path) {
    let mut xtask = Command::new(env!("CARGO"));
    xtask.args([
        "run",
        "--quiet",
        "--package",
        "xtask",
        "--",
        "gpu-smoke",
        "--tiny",
    ]);
    xtask
        .args(["--target", DEVICE, "--program", PROGRAM, "--out"])
        .arg(folder);
    let (text, code) = said(&mut xtask);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains(", 0 failed, "), "{text}");
}

fn run(smoke: &Path, out: &Path, options: &[&str]) -> (String, Option<i32>) {
    let mut command = Command::new(smoke.join("run.sh"));
    command
        .args(["--device", DEVICE, "--tiny", "--out"])
        .arg(out)
        .args(options);
    said(&mut command)
}

/// The outcome of a step as the summary tells it.
fn outcome<'a>(summary: &'a str, step: &str) -> &'a str {
    let mut lines = summary.lines().filter(|line| !line.starts_with('#'));
    let line = lines.find(|line| line.split_whitespace().next() == Some(step));
    let line = line.unwrap_or_else(|| panic!("no {step} in\n{summary}"));
    line.split_whitespace().nth(1).unwrap_or_default()
}

#[test]
fn the_smoke_test_runs_dry() {
    testing::installed(ToolKind::Cuda);
    let folder = tempfile::tempdir().unwrap();
    let (smoke, out) = (folder.path().join("smoke"), folder.path().join("results"));
    make(&smoke);
    every_step(&smoke, &out);
    parts(&smoke, folder.path());
    without_a_gpu(&smoke, folder.path());
    misses_and_hangs(&smoke, folder.path());
}

fn every_step(smoke: &Path, out: &Path) {
    let (text, code) = run(smoke, out, &[]);
    assert_eq!(code, Some(0), "{text}");
    let read = |name: &str| fs::read_to_string(out.join(name)).unwrap();
    let summary = read("summary.txt");
    let steps = [
        ("probe", "ok", "0 differ, 0 failed"),
        ("check", "absent", "no streams"),
        (
            "conformance",
            "ok",
            "0 fail, 0 chose other experts, 0 did not run",
        ),
        (
            "oracles",
            "ok",
            "0 fail, 0 chose other experts, 0 did not run",
        ),
        (
            "training",
            "ok",
            "0 fail, 0 chose other experts, 0 did not run",
        ),
        ("sanitize", "absent", "compute-sanitizer is not here"),
        (
            "launches",
            "ok",
            "launches of a call are counted, times mean nothing",
        ),
        (
            "layers",
            "ok",
            "0 lines failed, 0 found too little memory, 0 were not begun",
        ),
    ];
    for (number, (step, expected, part)) in steps.into_iter().enumerate() {
        assert_eq!(outcome(&summary, step), expected, "{summary}");
        let file = read(&format!("{}-{step}.txt", number + 1));
        assert!(file.contains(part), "{step}:\n{file}");
        let of_device = file.contains("# PTX simulator, sm_90a");
        assert!(
            of_device && file.contains(" UTC, Linux x86_64, folder "),
            "{file}"
        );
    }
    let layers = read("8-layers.txt");
    for table in [
        "## qwen3, forward",
        "share of one device of 8), both",
        "## gpt-oss, both",
    ] {
        assert!(layers.contains(table), "{layers}");
    }
    assert!(
        !layers.contains(" ms"),
        "a simulator has no times:\n{layers}"
    );
}

/// `--only` and `--minutes`, and what is no option.
fn parts(smoke: &Path, folder: &Path) {
    let out = folder.join("parts");
    let (text, code) = run(
        smoke,
        &out,
        &["--only", "launches,training", "--minutes", "0"],
    );
    assert_eq!(code, Some(2), "nothing ran: {text}");
    assert!(text.contains("training     left out"), "{text}");
    assert!(!text.contains("conformance"), "{text}");
    let (text, code) = run(smoke, &out, &["--only", "nonsense"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("there is no step nonsense"), "{text}");
}

/// Without a GPU every step says so in one line, and the next goes on.
fn without_a_gpu(smoke: &Path, folder: &Path) {
    if Path::new("/dev/nvidiactl").exists() {
        return;
    }
    let mut command = Command::new(smoke.join("run.sh"));
    command.args(["--device", "cuda", "--tiny", "--out"]);
    let (text, code) = said(command.arg(folder.join("none")));
    assert_eq!(code, Some(2), "{text}");
    let absent = text.lines().filter(|line| line.contains(" absent "));
    assert_eq!(absent.count(), 8, "{text}");
    assert!(text.contains("the CUDA driver"), "{text}");
}

/// A kernel that is not in the pack is named, and an item that hangs costs itself alone.
fn misses_and_hangs(smoke: &Path, folder: &Path) {
    let suite = |store: &Path, options: &[&str]| {
        let mut command = Command::new(smoke.join("moesaic-gpu-smoke"));
        command.args(["suite", "training", "--tiny", "--device", DEVICE, "--store"]);
        command
            .arg(store)
            .arg("--data")
            .arg(smoke.join("data"))
            .args(options);
        said(command.env("MOESAIC_NVRTC", "/nothing"))
    };
    let (text, code) = suite(&folder.join("empty"), &[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("0 of ") && text.contains("is not in the cache"),
        "{text}"
    );
    let (text, code) = suite(&folder.join("empty"), &["--each", "0"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("no end after 0 s") && text.ends_with(" 0 did not run\n"),
        "{text}"
    );
}
