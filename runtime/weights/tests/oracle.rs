//! Layers imported from Hugging Face checkpoints give what transformers gives.

mod support;

use std::fs;
use std::path::{Path, PathBuf};

fn cases(folder: &str) -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/oracle")
        .join(folder);
    let entries = fs::read_dir(&root).unwrap_or_else(|e| panic!("{}: {e}", root.display()));
    let mut dirs: Vec<PathBuf> = entries
        .map(|e| e.unwrap().path())
        .filter(|p| p.is_dir())
        .collect();
    dirs.sort();
    dirs
}

fn check_all(folder: &str, least: usize) {
    let dirs = cases(folder);
    assert!(
        dirs.len() >= least,
        "{folder} has only {} cases",
        dirs.len()
    );
    for dir in dirs {
        let report = support::check(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        assert_eq!(report.wrong_rows, 0, "{}", dir.display());
        assert!(report.error < 2e-6, "{}: {:e}", dir.display(), report.error);
    }
}

#[test]
fn published_families() {
    check_all("hf", 6);
}

#[test]
fn more_families() {
    check_all("hf_more", 30);
}
