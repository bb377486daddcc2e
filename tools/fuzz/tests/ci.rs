//! Some inputs of every kind, and every input that once failed.

use std::path::Path;
use std::process::{Command, Output};

fn fuzz(words: &[&str]) -> (bool, String) {
    let out = tempfile::tempdir().expect("a folder");
    let run = Command::new(env!("CARGO_BIN_EXE_fuzz"))
        .args(words)
        .arg("--out")
        .arg(out.path())
        .output();
    let Output {
        status,
        stdout,
        stderr,
    } = run.expect("it runs");
    let said = [stdout, stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    (status.success(), said)
}

#[test]
fn ten_thousand_inputs_break_nothing() {
    let (well, said) = fuzz(&["--inputs", "10000", "--seed", "1"]);
    assert!(well, "{said}");
    for line in said.lines().filter(|line| line.contains("accepted")) {
        // A surface that accepts or rejects everything tests nothing.
        let numbers: Vec<u64> = line
            .split(' ')
            .filter_map(|word| word.parse().ok())
            .collect();
        let (inputs, accepted) = (numbers[0], numbers[1]);
        assert!(0 < accepted && accepted < inputs, "{line}");
    }
    assert_eq!(said.matches("accepted").count(), 15, "{said}");
}

#[test]
fn inputs_that_once_failed_do_no_more() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions");
    let mut words = Vec::new();
    for surface in std::fs::read_dir(folder).expect("it is there").flatten() {
        for file in std::fs::read_dir(surface.path())
            .expect("a folder")
            .flatten()
        {
            words.extend(["--file".to_string(), file.path().display().to_string()]);
        }
    }
    assert!(words.len() > 6, "{words:?}");
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (well, said) = fuzz(&words);
    assert!(well, "{said}");
}

#[test]
fn words_that_mean_nothing_are_refused() {
    for words in [
        &["--inputs"][..],
        &["--inputs", "x"],
        &["--surface", "x"],
        &["--x", "1"],
    ] {
        let (well, said) = fuzz(words);
        assert!(!well && !said.is_empty(), "{words:?}: {said}");
    }
}
