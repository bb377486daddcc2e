//! The pages: links lead somewhere, and lines are as long as a screen is wide.

use super::tidy::files;
use std::fs;
use std::path::{Path, PathBuf};

const COLUMNS: usize = 100;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn pages() -> Vec<PathBuf> {
    let mut pages: Vec<PathBuf> = ["README.md", "CHANGELOG.md"]
        .map(|name| root().join(name))
        .into();
    for folder in ["docs", "benches", "examples", "interop", "tests"] {
        pages.extend(files(&root().join(folder), &["md"]));
    }
    pages
}

/// Lines of text: no code, no tables, no pictures.
fn text(page: &str) -> Vec<(usize, &str)> {
    let mut code = false;
    let mut lines = Vec::new();
    for (number, line) in page.lines().enumerate() {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        let other = ["    ", "|", "!["]
            .iter()
            .any(|start| line.starts_with(start));
        if !(fence || code || other) {
            lines.push((number + 1, line));
        }
    }
    lines
}

/// Where links of a line lead: `](target)`.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')').map(|(target, _)| target))
}

#[test]
fn links_lead_somewhere() {
    let mut dead = Vec::new();
    for page in pages() {
        let content = fs::read_to_string(&page).expect("a page");
        let folder = page.parent().expect("a folder");
        for link in content.lines().flat_map(links) {
            let file = link.split('#').next().unwrap_or_default();
            let elsewhere = link.contains("://") || file.is_empty();
            if !elsewhere && !folder.join(file).exists() {
                dead.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(dead.is_empty(), "{}", dead.join("\n"));
}

#[test]
fn lines_are_as_long_as_a_screen_is_wide() {
    let mut long = Vec::new();
    for page in pages() {
        let content = fs::read_to_string(&page).expect("a page");
        for (number, line) in text(&content) {
            // A word that is longer cannot be broken.
            if line.chars().count() > COLUMNS && line.trim().contains(' ') {
                long.push(format!("{}:{number}", page.display()));
            }
        }
    }
    let say = "lines of more than 100 columns; wrap them";
    assert!(long.is_empty(), "{say}:\n{}", long.join("\n"));
}

/// What the first page shows of a kernel is what is emitted.
#[test]
fn the_kernel_that_is_shown_is_emitted() {
    let read = |path: &str| fs::read_to_string(root().join(path)).expect(path);
    let page = read("README.md");
    let kernel = read("tests/golden/combine/mixtral-8x7b.combine.cuda-sm_90a.cu");
    let shown = page
        .split("```cuda\n")
        .nth(1)
        .and_then(|rest| rest.split("```").next());
    let shown = shown.expect("the page shows one").lines();
    let lines: Vec<&str> = kernel.lines().collect();
    let other: Vec<&str> = shown
        .filter(|line| !line.contains('…') && !lines.contains(line))
        .collect();
    assert!(
        other.is_empty(),
        "README.md shows what is not emitted:\n{}",
        other.join("\n")
    );
}
