//! How the project writes: words that were replaced stay away, doc comments say what an item is,
//! pages speak to their reader, hard code says why.

use super::old_words::OLD_WORDS;
use super::tidy::files;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The most doc paragraphs of the workspace, as a share, that may open with one of
/// [`INDIRECT`].
const MOST_INDIRECT: f64 = 0.03;

/// Openers of an indirect question or of a sentence without its subject.
const INDIRECT: [&str; 6] = ["What", "Which", "Of", "Those", "By", "How"];

/// The least share of sentences of each of [`GUIDES`] that address the reader.
const LEAST_YOU: f64 = 0.07;

/// Pages that teach.
const GUIDES: [&str; 5] = [
    "README.md",
    "docs/GUIDE.md",
    "docs/TRAINING.md",
    "docs/DISTRIBUTED.md",
    "docs/ADAPTIVE.md",
];

/// Sources whose reasons a reader cannot guess, and the least number of comment lines for a line
/// of code.
const HARD: [(&str, f64); 9] = [
    ("runtime/engine/src", 0.03),
    ("codegen/plan/src", 0.03),
    ("runtime/collectives/src", 0.03),
    ("runtime/planner/src", 0.03),
    ("targets/sim/emulated/src", 0.03),
    ("targets/sim/fibers/src", 0.03),
    ("targets/sim/hardware/src", 0.03),
    ("targets/sim/ptx/src", 0.03),
    ("templates", 0.03),
];

/// Folders whose text comes from elsewhere, or was recorded when words were others.
const FOREIGN: [&str; 3] = ["benches/results", "examples/data", "tests/oracle"];

fn root() -> &'static Path {
    Path::new(crate::ROOT)
}

/// The path below the repository.
fn short(path: &Path) -> String {
    let below = path.strip_prefix(root()).unwrap_or(path);
    below.to_string_lossy().into_owned()
}

/// Every text of the project, by its path below the repository.
fn texts() -> Vec<(String, String)> {
    let mut paths = Vec::new();
    for extension in [
        ".rs", ".md", ".toml", ".tera", ".c", ".h", ".cu", ".hip", ".py", ".sh", ".json", ".css",
        ".stderr", ".txt",
    ] {
        paths.extend(files(root(), &[extension]));
    }
    paths.sort();
    paths.dedup();
    let named = paths.into_iter().map(|path| (short(&path), path));
    let ours = named.filter(|(name, _)| {
        let foreign = FOREIGN.iter().any(|folder| name.starts_with(folder));
        !foreign && !["tests/old_words.rs", "tests/prose.rs"].contains(&&**name)
    });
    ours.filter_map(|(name, path)| Some((name, fs::read_to_string(path).ok()?)))
        .collect()
}

/// The text as one line, without the marks that comments begin with, so that a phrase is found
/// where it is wrapped; and where each line begins.
fn unwrapped(text: &str) -> (String, Vec<usize>) {
    let (mut whole, mut starts) = (String::with_capacity(text.len()), Vec::new());
    for line in text.lines() {
        starts.push(whole.len());
        let line = line.trim();
        let line = ["///", "//!", "//", "#", "*"]
            .iter()
            .find_map(|mark| line.strip_prefix(mark))
            .unwrap_or(line);
        whole += line.trim();
        whole.push(' ');
    }
    (whole, starts)
}

fn of_a_word(c: Option<char>) -> bool {
    c.is_some_and(|c| c.is_alphanumeric() || c == '_')
}

/// Where `pattern` stands in `text` as words of their own; a `*` at an end of it stands for the
/// rest of a word.
fn found<'a>(text: &'a str, pattern: &'a str) -> impl Iterator<Item = usize> + 'a {
    let (before, after) = (pattern.starts_with('*'), pattern.ends_with('*'));
    let word = pattern.trim_matches('*');
    // The first and last characters need a boundary only if they could go on as a word.
    let first = !before && of_a_word(word.chars().next());
    let last = !after && of_a_word(word.chars().next_back());
    text.match_indices(word)
        .map(|(at, _)| at)
        .filter(move |at| {
            let left = !first || !of_a_word(text[..*at].chars().next_back());
            let right = !last || !of_a_word(text[at + word.len()..].chars().next());
            left && right
        })
}

#[test]
fn patterns_are_found_as_words() {
    let text = "copy engines, route=linear any_ways; Desks desk";
    let count = |pattern| found(text, pattern).count();
    assert_eq!(count("copy engine"), 0);
    assert_eq!(count("copy engine*"), 1);
    assert_eq!(count("route="), 1);
    assert_eq!(count("ways"), 0);
    assert_eq!(count("*_ways"), 1);
    assert_eq!(count("Desk"), 0);
    assert_eq!(count("desk"), 1);
    let (whole, starts) = unwrapped("    // the copy\n    // engine");
    assert_eq!((&*whole, &*starts), ("the copy engine ", &[0, 9][..]));
}

#[test]
fn no_old_word_is_left() {
    let mut hits: BTreeMap<(&str, &str, &str), Vec<String>> = BTreeMap::new();
    for (name, text) in texts() {
        let (whole, starts) = unwrapped(&text);
        for &(area, old, new) in OLD_WORDS {
            for at in found(&whole, old) {
                let line = starts.partition_point(|start| *start <= at);
                let places = hits.entry((area, old, new)).or_default();
                places.push(format!("{name}:{line}"));
            }
        }
    }
    let lines = hits.iter().map(|((area, old, new), places)| {
        let few = places[..places.len().min(4)].join(", ");
        let count = places.len();
        format!("{area}: {count} of `{old}`, which is {new} now: {few}")
    });
    let lines: Vec<String> = lines.collect();
    assert!(lines.is_empty(), "old words:\n{}", lines.join("\n"));
}

/// Sources that are no tests.
fn sources() -> Vec<PathBuf> {
    let mut sources = files(root(), &[".rs"]);
    sources.retain(|path| {
        let name = short(path);
        !name.split('/').any(|part| part == "tests") && !name.ends_with("tests.rs")
    });
    sources
}

/// What stands before the tests of a file.
fn before_tests(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod ").next().unwrap_or_default()
}

/// A paragraph of a doc comment: its first line, the number of that, and the code below the
/// comment.
struct Paragraph<'a> {
    number: usize,
    line: &'a str,
    item: &'a str,
}

/// Paragraphs of doc comments; headings, lists, tables and code are none.
fn paragraphs(text: &str) -> Vec<Paragraph<'_>> {
    let mut found: Vec<Paragraph<'_>> = Vec::new();
    let (mut fresh, mut code, mut open) = (true, false, 0);
    for (i, line) in text.lines().enumerate() {
        let line = line.trim_start();
        let said = line
            .strip_prefix("///")
            .or_else(|| line.strip_prefix("//!"));
        let Some(said) = said else {
            // Attributes stand between a comment and its item.
            if !line.starts_with('#') {
                for paragraph in &mut found[open..] {
                    paragraph.item = line;
                }
                open = found.len();
            }
            (fresh, code) = (true, false);
            continue;
        };
        let said = said.trim();
        if said.starts_with("```") {
            (code, fresh) = (!code, false);
        } else if said.is_empty() {
            fresh = !code;
        } else if !code {
            let prose = !said.starts_with(['#', '|', '-', '*', '['])
                && !said.starts_with(|c: char| c.is_ascii_digit());
            if fresh && prose {
                found.push(Paragraph {
                    number: i + 1,
                    line: said,
                    item: "",
                });
            }
            fresh = false;
        }
    }
    found
}

fn first_word(line: &str) -> &str {
    let end = line.find(|c: char| !c.is_alphabetic());
    &line[..end.unwrap_or(line.len())]
}

/// Lines of counts, the highest first, with a few places of each.
fn by_folder(places: &[String]) -> String {
    let mut folders: BTreeMap<String, Vec<&String>> = BTreeMap::new();
    for place in places {
        let below = place.rsplit_once('/').map_or("", |(folder, _)| folder);
        let folder: Vec<&str> = below.split('/').take(2).collect();
        folders.entry(folder.join("/")).or_default().push(place);
    }
    let mut folders: Vec<_> = folders.into_iter().collect();
    folders.sort_by_key(|(_, places)| std::cmp::Reverse(places.len()));
    let lines = folders.iter().map(|(folder, places)| {
        let few: Vec<&str> = places.iter().take(3).map(|place| place.as_str()).collect();
        format!("{folder}: {}: {}", places.len(), few.join(", "))
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn doc_comments_say_what_an_item_is() {
    let (mut all, mut indirect) = (0, Vec::new());
    for path in sources() {
        let text = fs::read_to_string(&path).expect("a source");
        for paragraph in paragraphs(before_tests(&text)) {
            all += 1;
            if INDIRECT.contains(&first_word(paragraph.line)) {
                indirect.push(format!("{}:{}", short(&path), paragraph.number));
            }
        }
    }
    let share = indirect.len() as f64 / f64::from(all);
    assert!(
        share < MOST_INDIRECT,
        "{} of {all} doc paragraphs ({:.1} %, {:.0} % is the most) open with one of {INDIRECT:?}:\n{}",
        indirect.len(),
        100.0 * share,
        100.0 * MOST_INDIRECT,
        by_folder(&indirect)
    );
}

/// Whether a line declares a field, or an argument of a program, that is true or false.
fn is_boolean_field(item: &str) -> bool {
    let declared = item.trim_end().trim_end_matches(',');
    declared.ends_with(": bool") || declared.contains("bool>") || declared.contains("[bool")
}

#[test]
fn whether_is_for_boolean_fields() {
    let mut wrong = Vec::new();
    for path in sources() {
        let text = fs::read_to_string(&path).expect("a source");
        for paragraph in paragraphs(before_tests(&text)) {
            if first_word(paragraph.line) == "Whether" && !is_boolean_field(paragraph.item) {
                wrong.push(format!("{}:{}", short(&path), paragraph.number));
            }
        }
    }
    let say = "doc paragraphs open with `Whether` and are of no boolean field; a function \
               \"Returns whether ...\"";
    let count = wrong.len();
    assert!(wrong.is_empty(), "{count} {say}:\n{}", by_folder(&wrong));
}

/// Sentences of a page's prose: no code, headings, tables or pictures.
fn sentences(page: &str) -> Vec<String> {
    let (mut paragraphs, mut code) = (vec![String::new()], false);
    for line in page.lines() {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        let other = line.starts_with(['|', '#', '!']) || line.starts_with("    ");
        let item = line.starts_with("- ") || line.starts_with("* ");
        if fence || code || other || item || line.trim().is_empty() {
            paragraphs.push(String::new());
        }
        if !(fence || code || other) {
            let paragraph = paragraphs.last_mut().expect("one at least");
            *paragraph += line.trim();
            paragraph.push(' ');
        }
    }
    let ends = |paragraph: &String| -> Vec<String> {
        let whole = paragraph.replace("? ", ".\n").replace("! ", ".\n");
        let whole = whole.replace(". ", ".\n");
        whole.lines().map(str::to_string).collect()
    };
    let each = paragraphs.iter().flat_map(ends);
    each.filter(|sentence| sentence.contains(' ')).collect()
}

#[test]
fn pages_speak_to_their_reader() {
    let mut low = Vec::new();
    for name in GUIDES {
        let page = fs::read_to_string(root().join(name)).expect(name);
        let all = sentences(&page);
        let addressed = all.iter().filter(|sentence| {
            let words = sentence.split(|c: char| !c.is_alphabetic());
            words
                .map(str::to_lowercase)
                .any(|w| w == "you" || w == "your" || w == "yours")
        });
        let addressed = addressed.count();
        let share = addressed as f64 / all.len() as f64;
        if share < LEAST_YOU {
            let (all, percent) = (all.len(), 100.0 * share);
            low.push(format!(
                "{name}: {addressed} of {all} sentences, {percent:.1} %"
            ));
        }
    }
    let least = 100.0 * LEAST_YOU;
    let say = "pages address the reader as *you* in too few sentences";
    assert!(
        low.is_empty(),
        "{say}, {least:.0} % is the least:\n{}",
        low.join("\n")
    );
}

/// Lines that say why, and lines of code.
fn comments(path: &Path) -> [usize; 2] {
    let text = fs::read_to_string(path).expect("a source");
    let template = path.extension().is_some_and(|e| e != "rs");
    let [mut said, mut code] = [0, 0];
    for line in before_tests(&text).lines().map(str::trim) {
        let marks: &[&str] = if template {
            &["//", "/*", "{#"]
        } else {
            &["//"]
        };
        let doc = line.starts_with("///") || line.starts_with("//!");
        if doc && !template {
            continue;
        }
        if marks.iter().any(|mark| line.starts_with(mark)) {
            said += 1;
        } else if !line.is_empty() {
            code += 1;
        }
    }
    [said, code]
}

#[test]
fn hard_code_says_why() {
    let mut low = Vec::new();
    for (folder, least) in HARD {
        let mut sources = files(&root().join(folder), &[".rs", ".tera", ".c", ".h"]);
        sources.retain(|path| !short(path).ends_with("tests.rs"));
        let counts = sources.iter().map(|path| comments(path));
        let [said, code] = counts.fold([0, 0], |sum, [a, b]| [sum[0] + a, sum[1] + b]);
        let share = said as f64 / code as f64;
        if share < least {
            low.push(format!(
                "{folder}: {said} lines of comments, {code} of code: {share:.4}, at least {least}"
            ));
        }
    }
    assert!(low.is_empty(), "too few reasons:\n{}", low.join("\n"));
}
