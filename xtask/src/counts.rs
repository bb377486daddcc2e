//! How far one change reaches: counts of files, of public names and of circles.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

const OPERATORS: [&str; 10] = [
    "gate_topk",
    "expert_scan",
    "dispatch",
    "grouped_gemm",
    "combine",
    "gate_topk_bwd",
    "dispatch_bwd",
    "grouped_gemm_dgrad",
    "grouped_gemm_wgrad",
    "combine_bwd",
];

/// Options that one operator alone reads.
const OPTIONS: [&str; 5] = [
    "random_second",
    "norm_order",
    "input_dropout",
    "up_offset",
    "expert_scale",
];

const BACKENDS: [&str; 3] = ["cpu", "cuda", "rocm"];

/// A source file, tests aside.
struct File {
    /// From the root: `codegen/plan/src/work.rs`.
    path: String,
    /// Without comments and unit tests.
    code: String,
}

/// Counts the checkout at `root`.
pub fn counts(root: &Path) -> String {
    let folders = ["codegen", "runtime", "targets", "templates", "src", "cli"];
    let files: Vec<File> = folders.iter().flat_map(|f| sources(root, f)).collect();
    let mut text = String::new();
    operators(&files, &mut text);
    options(&files, &mut text);
    backends(&files, &mut text);
    facade(&files, &mut text);
    circles(&files, &mut text);
    lines(root, &mut text);
    templates(root, &mut text);
    words(root, &mut text);
    paragraphs(root, &mut text);
    text
}

/// Words that only this project had, for things that its field has words for.
const OWN_WORDS: [&str; 6] = [
    "crew",
    "hall",
    "board",
    "memory node",
    "near_packed",
    "strip",
];

/// How often such words are in code, templates and docs.
fn words(root: &Path, text: &mut String) {
    let of = |end: &str| texts(root, end);
    let all: Vec<(PathBuf, String)> = [".rs", ".tera", ".md"].iter().flat_map(|e| of(e)).collect();
    let own = Path::new("xtask/src/counts.rs"); // this list
    *text += "\nwords of this project alone\n";
    for word in OWN_WORDS {
        let there = all.iter().filter(|(path, _)| !path.ends_with(own));
        let times = there.map(|(_, text)| text.matches(&format!("{word} ")).count());
        line(text, word, times.sum());
    }
}

/// The longest paragraph of each page, in words; tables and code aside.
fn paragraphs(root: &Path, text: &mut String) {
    let mut pages = texts(&root.join("docs"), ".md");
    pages.sort();
    *text += "\nwords of the longest paragraph of each page\n";
    for (path, page) in pages {
        let path = path.strip_prefix(root).unwrap_or(&path).to_path_buf();
        line(text, &path.display().to_string(), longest_paragraph(&page));
    }
}

fn longest_paragraph(page: &str) -> usize {
    let (mut longest, mut here, mut code) = (0, 0, false);
    for line in page.lines() {
        code ^= line.starts_with("```");
        let start = line.trim_start();
        let number = start.trim_start_matches(|c: char| c.is_ascii_digit());
        let item = start.starts_with("- ") || (number != start && number.starts_with(". "));
        if code || item || line.trim().is_empty() || line.starts_with(['|', '#', '`']) {
            here = 0;
        }
        if !code && !line.starts_with(['|', '#', '`']) && !line.starts_with("    ") {
            here += line.split_whitespace().count();
        }
        longest = longest.max(here);
    }
    longest
}

/// Lines of each kind of text below the root, build output aside.
fn lines(root: &Path, text: &mut String) {
    *text += "\nlines\n";
    let kinds = [
        ("Rust", "", ".rs"),
        ("templates", "templates", ".tera"),
        ("golden text", "tests/golden", ""),
        ("docs", "", ".md"),
    ];
    for (name, folder, end) in kinds {
        let texts = texts(&root.join(folder), end);
        let lines = texts.iter().map(|(_, text)| text.lines().count());
        let _ = writeln!(text, "  {name:25}{:>7}", lines.sum::<usize>());
    }
}

/// Tags of templates, and lines that a screen does not hold.
fn templates(root: &Path, text: &mut String) {
    let all = texts(&root.join("templates"), ".tera");
    let mut rows: Vec<(usize, usize, String)> = Vec::new();
    for (path, template) in &all {
        let tags = template.matches("{{").count() + template.matches("{%").count();
        let longest = template.lines().map(|line| line.chars().count()).max();
        let path = path.strip_prefix(root.join("templates")).unwrap_or(path);
        rows.push((tags, longest.unwrap_or(0), path.display().to_string()));
    }
    let most = rows.iter().filter(|row| row.0 >= 100).count();
    let wide = rows.iter().filter(|row| row.1 > 120).count();
    *text += "\ntemplates\n";
    line(text, "files", rows.len());
    line(text, "with 100 tags or more", most);
    line(text, "with a line over 120", wide);
    *text += "\ntags and longest line of those with most tags, and of CPU products\n";
    rows.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.2.cmp(&b.2)));
    for (i, (tags, longest, path)) in rows.iter().enumerate() {
        let product = path.starts_with("cpu/g") && path.contains("gemm");
        if i < 10 || product {
            let _ = writeln!(text, "  {tags:>4} {longest:>4}  {path}");
        }
    }
}

/// The text files below a folder whose names end so, build output aside.
fn texts(folder: &Path, end: &str) -> Vec<(PathBuf, String)> {
    let mut list = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with('.') || name == "target" {
            continue;
        }
        if entry.path().is_dir() {
            list.extend(texts(&entry.path(), end));
        } else if name.ends_with(end) {
            let text = fs::read_to_string(entry.path());
            list.extend(text.ok().map(|text| (entry.path(), text)));
        }
    }
    list
}

/// The `.rs` and `.tera` files below a folder, but those of tests and build output.
fn sources(root: &Path, folder: &str) -> Vec<File> {
    let mut list = Vec::new();
    let mut folders = vec![PathBuf::from(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root.join(&folder))
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = folder.join(&name);
            let is_test = ["tests", "tests.rs", "testing.rs", "target", "examples"];
            if is_test.contains(&&*name) {
                continue;
            }
            if entry.path().is_dir() {
                folders.push(path);
            } else if name.ends_with(".rs") || name.ends_with(".tera") {
                let text = fs::read_to_string(entry.path()).unwrap_or_default();
                let path = path.display().to_string();
                list.push(File {
                    path,
                    code: code(&text),
                });
            }
        }
    }
    list.sort_by(|a, b| a.path.cmp(&b.path));
    list
}

/// The text before unit tests, without lines that are comments.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let lines = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    lines.flat_map(|line| [line, "\n"]).collect()
}

/// Whether `word` is in the text between characters that are of no name.
fn has_word(text: &str, word: &str) -> bool {
    let of_name = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + word.len()..]);
        !before.ends_with(of_name) && !after.starts_with(of_name)
    })
}

fn camel(stem: &str) -> String {
    let word = |word: &str| word[..1].to_uppercase() + &word[1..];
    stem.split('_').map(word).collect()
}

/// The folder of an operator in `codegen/plan/src/ops`.
fn home(stem: &str) -> &str {
    match stem.trim_start_matches("grouped_").split('_').next() {
        Some("expert") => "scan",
        Some(home) => home,
        None => stem,
    }
}

fn operators(files: &[File], text: &mut String) {
    *text += "files of codegen/plan/src that name an operator: dispatch_bwd, DispatchBwd, DispatchBwdDesc \
              or DispatchBwdConfig, or have it in their path\n";
    let plan = files
        .iter()
        .filter(|f| f.path.starts_with("codegen/plan/src"));
    let plan: Vec<&File> = plan.collect();
    for stem in OPERATORS {
        let camel = camel(stem);
        let words = ["", "Desc", "Config"].map(|end| format!("{camel}{end}"));
        let names = |file: &&&File| {
            let part = |part: &str| part.trim_end_matches(".rs") == stem;
            file.path.split('/').any(part)
                || has_word(&file.code, stem)
                || words.iter().any(|word| has_word(&file.code, word))
        };
        let folder = format!("codegen/plan/src/ops/{}/", home(stem));
        let (own, others): (Vec<&&File>, Vec<&&File>) = plan
            .iter()
            .filter(names)
            .partition(|file| file.path.starts_with(&folder));
        let (count, outside) = (own.len() + others.len(), others.len());
        let _ = writeln!(
            text,
            "  {stem:<25} {count:>6}, outside ops/{} {outside}",
            home(stem)
        );
    }
    line(text, "of", plan.len());
}

fn options(files: &[File], text: &mut String) {
    *text += "\nfiles that name an option of the spec (code and templates, reference and command line too)\n";
    for option in OPTIONS {
        let names = files.iter().filter(|file| has_word(&file.code, option));
        line(text, option, names.count());
    }
}

fn backends(files: &[File], text: &mut String) {
    *text += "\nfiles that name a backend in code, outside those that are its own \
              (targets/X, templates/X, tiles/X)\n";
    for backend in BACKENDS {
        let kind = camel(backend);
        let words = [
            format!("Target::{kind}"),
            format!("SimArch::{kind}"),
            format!("moesaic_{backend}"),
            format!("mod {backend}"),
            format!("{backend}::"),
        ];
        let own = |path: &str| {
            let parts: Vec<&str> = path.split(['/', '.']).collect();
            let homes = ["targets", "templates", "tiles"];
            parts
                .windows(2)
                .any(|w| homes.contains(&w[0]) && w[1] == backend)
        };
        let names = |file: &&File| {
            !own(&file.path) && words.iter().any(|word| file.code.contains(word.as_str()))
        };
        let found: Vec<&File> = files.iter().filter(names).collect();
        let mut folders: BTreeMap<&str, usize> = BTreeMap::new();
        for file in &found {
            let folder = file.path.split("/src").next().unwrap_or_default();
            let folder = folder.split_once("src/").map_or(folder, |_| "src");
            *folders.entry(folder).or_default() += 1;
        }
        let folders: Vec<String> = folders
            .iter()
            .map(|(folder, n)| {
                format!(
                    "{n} {}",
                    if folder.contains(".rs") {
                        "src"
                    } else {
                        folder
                    }
                )
            })
            .collect();
        line(text, backend, found.len());
        let _ = writeln!(text, "    {}", folders.join(", "));
    }
}

fn facade(files: &[File], text: &mut String) {
    // Those of src/face are at the root, too: `pub use face::*`.
    let face = |path: &str| path.starts_with("src/face/") && !path.ends_with("mod.rs");
    let roots = files
        .iter()
        .filter(|f| f.path == "src/lib.rs" || face(&f.path));
    let names = roots.flat_map(|file| exported(&file.code));
    let (hidden, shown): (Vec<_>, Vec<_>) = names.partition(|name| name.hidden);
    *text += "\nnames at the root of the facade\n";
    line(text, "documented", shown.len());
    line(text, "hidden", hidden.len());
}

/// A name that a file exports.
struct Exported {
    hidden: bool,
}

/// The names of `pub use`, `pub mod` and items at the left margin.
fn exported(code: &str) -> Vec<Exported> {
    let mut names = Vec::new();
    let mut hidden = false;
    let mut lines = code.lines();
    while let Some(line) = lines.next() {
        if line.starts_with("#[") {
            hidden |= line.contains("doc(hidden)") || line.contains("cfg(doctest)");
            continue;
        }
        if let Some(rest) = line.strip_prefix("pub ") {
            let mut item = rest.to_string();
            while rest.starts_with("use ") && !item.contains(';') {
                let Some(next) = lines.next() else { break };
                item += next.trim();
            }
            if item.ends_with("::*;") {
                continue;
            }
            let list = item.split_once('{').filter(|_| item.starts_with("use "));
            let count = list.map_or(1, |(_, list)| {
                let list = list.split('}').next().unwrap_or_default();
                list.split(',')
                    .filter(|name| !name.trim().is_empty())
                    .count()
            });
            names.extend((0..count).map(|_| Exported { hidden }));
        }
        hidden = false;
    }
    names
}

/// Modules of the engine that use each other, directly or through others.
fn circles(files: &[File], text: &mut String) {
    let inner = |file: &File| Some(file.path.strip_prefix("runtime/engine/src/")?.to_string());
    let engine = files
        .iter()
        .filter_map(|file| Some((inner(file)?, &*file.code)));
    let (lib, own): (Vec<_>, Vec<_>) = engine.partition(|(path, _)| path == "lib.rs");
    let homes = lib.iter().flat_map(|(_, code)| homes(code)).collect();
    let mut uses: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (path, _) in &own {
        let module = path.split(['/', '.']).next().unwrap_or_default();
        uses.entry(module).or_default();
    }
    let modules: Vec<&str> = uses.keys().copied().collect();
    for (path, code) in &own {
        let module = path.split(['/', '.']).next().unwrap_or_default();
        let used = from_crate(code).into_iter();
        let used = used.map(|name| BTreeMap::get(&homes, name).copied().unwrap_or(name));
        let used = used.filter_map(|name| modules.iter().find(|m| **m == name && name != module));
        uses.entry(module).or_default().extend(used);
    }
    let mutual = |(name, used): (&&str, &BTreeSet<&str>)| {
        let back = used
            .iter()
            .filter(|other| uses[**other].contains(*name) && *other > name);
        back.count()
    };
    *text += "\nmodules of runtime/engine\n";
    line(text, "modules", uses.len());
    line(
        text,
        "uses of another",
        uses.values().map(BTreeSet::len).sum(),
    );
    let in_circles = uses.keys().filter(|name| reaches(&uses, name));
    line(text, "in circles", in_circles.count());
    line(
        text,
        "pairs that use each other",
        uses.iter().map(mutual).sum(),
    );
}

/// The module of each name that the crate's root has from one.
fn homes(lib: &str) -> Vec<(&str, &str)> {
    let uses = lib.split("use ").skip(1);
    let uses = uses.filter_map(|rest| rest.split(';').next()?.split_once("::"));
    uses.flat_map(|(module, list)| identifiers(list).map(move |name| (name, module)))
        .collect()
}

/// What follows `crate::` in a text, of a list in braces each name.
fn from_crate(code: &str) -> Vec<&str> {
    let mut names = Vec::new();
    for rest in code.split("crate::").skip(1) {
        match rest.strip_prefix('{') {
            Some(list) => {
                let list = list.split(';').next().unwrap_or_default();
                names.extend(identifiers(list));
            }
            None => names.extend(identifiers(rest).next()),
        }
    }
    names
}

fn identifiers(text: &str) -> impl Iterator<Item = &str> {
    let of_name = |c: char| c.is_alphanumeric() || c == '_';
    text.split(move |c| !of_name(c))
        .filter(|name| !name.is_empty())
}

/// Whether a module uses itself, through others.
fn reaches(uses: &BTreeMap<&str, BTreeSet<&str>>, itself: &str) -> bool {
    let mut seen = BTreeSet::new();
    let mut open = vec![itself];
    while let Some(name) = open.pop() {
        for next in &uses[name] {
            if *next == itself {
                return true;
            }
            if seen.insert(*next) {
                open.push(next);
            }
        }
    }
    false
}

fn line(text: &mut String, name: &str, count: usize) {
    let _ = writeln!(text, "  {name:28}{count:>4}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> File {
        File {
            path: path.to_string(),
            code: code(text),
        }
    }

    #[test]
    fn paragraphs_end_where_a_reader_rests() {
        let page = "# a long heading of many words\n\none two\nthree\n\n- four\n- five six\n\n1. a b\n2. c d\n\n\
                    ```sh\na b c d e f\n```\n| a | b | c | d |\n";
        assert_eq!(longest_paragraph(page), 3);
    }

    #[test]
    fn names_are_words_of_code() {
        assert!(has_word("a.norm_order = 2", "norm_order"));
        assert!(!has_word("norm_orders, my_norm_order", "norm_order"));
        let text = code("// norm_order\nlet a;\n#[cfg(test)]\nmod tests { norm_order }\n");
        assert_eq!(text, "let a;\n");
    }

    #[test]
    fn exported_names_are_counted_one_by_one() {
        let lib =
            "pub use half;\npub use a::{\n    B, C,\n};\n#[doc(hidden)]\npub use d as e;\nmod f;\n";
        let names = exported(lib);
        assert_eq!(names.iter().filter(|n| !n.hidden).count(), 3);
        assert_eq!(names.iter().filter(|n| n.hidden).count(), 1);
    }

    #[test]
    fn circles_are_found_through_others() {
        let home = |name: &str| format!("runtime/engine/src/{name}.rs");
        let files = [
            file(&home("a"), "use crate::b::B;"),
            file(&home("b"), "use crate::{D, C};"),
            file(&home("lib"), "pub use c::{B, C};\npub use d::D;"),
            file(&home("c"), "use crate::a::A;\nuse crate::b::B;"),
            file(&home("d"), "use crate::a::A;"),
        ];
        let mut text = String::new();
        circles(&files, &mut text);
        let words: Vec<&str> = text.split_whitespace().collect();
        assert!(
            words.windows(3).any(|w| w == ["in", "circles", "4"]),
            "{text}"
        );
        assert!(
            words.windows(3).any(|w| w == ["each", "other", "1"]),
            "{text}"
        );
    }
}
