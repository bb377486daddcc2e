//! The pages: links lead somewhere, names of pages are links, lines are as long as a screen
//! is wide.

use super::tidy::files;
use std::fs;
use std::path::{Path, PathBuf};

const COLUMNS: usize = 100;

fn root() -> &'static Path {
    Path::new(crate::ROOT)
}

fn pages() -> Vec<PathBuf> {
    let mut pages: Vec<PathBuf> = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
        .map(|name| root().join(name))
        .into();
    for folder in [
        "docs",
        "benches",
        "examples",
        "interop",
        "templates",
        "tests",
        "tools",
    ] {
        pages.extend(files(&root().join(folder), &["md"]));
    }
    pages
}

/// Lines outside of code.
fn lines(page: &str) -> Vec<(usize, &str)> {
    let mut code = false;
    let mut lines = Vec::new();
    for (number, line) in page.lines().enumerate() {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        if !(fence || code || line.starts_with("    ")) {
            lines.push((number + 1, line));
        }
    }
    lines
}

/// Lines of text: no code, no tables, no pictures.
fn text(page: &str) -> Vec<(usize, &str)> {
    let mut lines = lines(page);
    lines.retain(|(_, line)| !line.starts_with('|') && !line.starts_with("!["));
    lines
}

/// Where links of a line lead: `](target)`.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')').map(|(target, _)| target))
}

/// Parts of a line that are in no link: neither its words nor where it leads.
fn unlinked(line: &str) -> impl Iterator<Item = &str> {
    line.split('[').map(|part| match part.split_once("](") {
        Some((_, rest)) => rest.split_once(')').map_or("", |(_, after)| after),
        None => part,
    })
}

/// Pages that a line names outside of links.
fn bare_names(line: &str) -> Vec<&str> {
    unlinked(line)
        .flat_map(|part| part.split(|c: char| !(c.is_alphanumeric() || "_-./".contains(c))))
        .map(|word| word.trim_end_matches('.'))
        .filter(|word| word.ends_with(".md") && *word != ".md")
        .collect()
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

/// Returns the anchor of a heading, as GitHub makes it: lower case, punctuation gone, spaces as
/// hyphens.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text
        .chars()
        .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn anchors_are_headings() {
    let mut dead = Vec::new();
    for page in pages() {
        let content = fs::read_to_string(&page).expect("a page");
        let folder = page.parent().expect("a folder");
        for link in content.lines().flat_map(links) {
            let Some((file, wanted)) = link.split_once('#') else {
                continue;
            };
            let target = match file {
                "" => page.clone(),
                file => folder.join(file),
            };
            if link.contains("://") || !file.is_empty() && !file.ends_with(".md") {
                continue;
            }
            let other = fs::read_to_string(&target).unwrap_or_default();
            let heading = |(_, line): &(usize, &str)| line.starts_with('#');
            let mut headings = lines(&other).into_iter().filter(heading);
            if !headings.any(|(_, line)| anchor(line) == wanted) {
                dead.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(dead.is_empty(), "links to no heading:\n{}", dead.join("\n"));
}

/// Folders at the root whose files pages and comments name by their whole path.
const FOLDERS: [&str; 13] = [
    "benches/",
    "cli/",
    "codegen/",
    "docs/",
    "examples/",
    "interop/",
    "runtime/",
    "src/",
    "targets/",
    "templates/",
    "tests/",
    "tools/",
    "xtask/",
];

/// Whether there is such a file, from the root or from a crate: `tests/mpi.rs` is one of
/// `runtime/collectives`. A folder that cargo builds in need not be there.
fn exists(path: &str) -> bool {
    let crates = ["codegen", "runtime", "targets", "targets/sim"].map(|group| root().join(group));
    let entries = crates
        .iter()
        .flat_map(|group| fs::read_dir(group).into_iter().flatten());
    let mut folders: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    folders.extend([root().to_path_buf(), root().join("cli")]);
    let built = path.split('/').any(|part| part == "target");
    built || folders.iter().any(|folder| folder.join(path).exists())
}

/// Files that a page names in code, such as `benches/results/layer.txt`, are there.
#[test]
fn files_that_are_named_exist() {
    let mut gone = Vec::new();
    for page in pages() {
        let content = fs::read_to_string(&page).expect("a page");
        for (number, line) in lines(&content) {
            for named in line.split('`').skip(1).step_by(2) {
                let path = named.trim_end_matches('/');
                let plain = path
                    .chars()
                    .all(|c| c.is_alphanumeric() || "_-./".contains(c));
                let ours = FOLDERS.iter().any(|folder| path.starts_with(folder));
                if plain && ours && !exists(path) {
                    gone.push(format!("{}:{number}: {named}", page.display()));
                }
            }
        }
    }
    assert!(gone.is_empty(), "names of no file:\n{}", gone.join("\n"));
}

/// What is made of the program's help aside: a terminal has no links.
#[test]
fn pages_that_are_named_are_links() {
    let mut bare = Vec::new();
    for page in pages() {
        let content = fs::read_to_string(&page).expect("a page");
        let written = content.split("<!-- What follows is made").next();
        for (number, line) in lines(written.unwrap_or_default()) {
            let names = bare_names(line).into_iter();
            bare.extend(names.map(|name| format!("{}:{number}: {name}", page.display())));
        }
    }
    let say = "names of pages that are no links; write [NAME](NAME.md)";
    assert!(bare.is_empty(), "{say}:\n{}", bare.join("\n"));
}

#[test]
fn names_in_links_are_not_bare() {
    let line = "[CLI](CLI.md), `docs/CLI.md`, [C.md](C.md) and B.md. *.md";
    assert_eq!(bare_names(line), ["docs/CLI.md", "B.md"]);
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
