//! `docs/SPEC.md`: every key of a spec, generated from the structs, the validator and the fixtures.
//!
//! Meanings are the doc comments of the fields. Types come from [`ROOT`]. Ranges come from the
//! validator's answers to numbers out of range. Defaults are those of the plainest spec, and models
//! are the configurations in `tests/oracle`. If the page in docs differs, its test fails;
//! `cargo xtask bless` rewrites it.

mod docs;
mod models;
mod ranges;

use crate::LayerSpec;
use crate::schema::{Key, Kind, ROOT, Section, join};
use docs::Docs;
use models::Models;
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};

const BEGIN: &str = "<!-- `cargo xtask bless` writes what follows from the structs. -->\n";

/// Columns of a line of text.
const COLUMNS: usize = 100;

/// The plainest spec, whose other values are the defaults.
const PLAINEST: &str = "shape = { model_dim = 64, hidden_dim = 128, experts = 8, top_k = 2 }\n";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The sources of a row.
struct Sources {
    docs: Docs,
    models: Models,
    /// The plainest spec as JSON.
    plain: Value,
}

impl Sources {
    fn read() -> Sources {
        let plain = LayerSpec::from_toml(PLAINEST).expect("it is valid");
        let plain = serde_json::to_value(plain).expect("a spec is JSON");
        Sources {
            docs: Docs::read(&root().join("codegen/spec/src")),
            models: Models::read(&plain),
            plain,
        }
    }

    /// Returns the default of a key, in TOML.
    fn default(&self, path: &str, key: &Key, in_list: bool) -> String {
        if key.required.is_some() {
            return "required".to_string();
        }
        if key.kind.is_table() {
            let optional = self.docs.is_optional(path);
            return if optional { "not set" } else { "its own" }.to_string();
        }
        match self.docs.default(path) {
            Some(default) => format!("`{default}`"),
            None if in_list => "not set".to_string(),
            None => match path
                .split('.')
                .try_fold(&self.plain, |at, name| at.get(name))
            {
                Some(value) => format!("`{}`", crate::write::written(value)),
                None => "not set".to_string(),
            },
        }
    }
}

/// Returns the type of a key, with its range if it is a number.
fn typed(path: &str, kind: &Kind, listed: bool) -> String {
    let range = || ranges::range(path).map_or(String::new(), |range| format!(": {range}"));
    match kind {
        Kind::Count => format!("whole number{}", range()),
        Kind::Number => format!("number{}", range()),
        Kind::Flag => "`true` or `false`".to_string(),
        Kind::Text => "text".to_string(),
        Kind::Choice(_) if listed => format!("[a word](#{})", anchor(path)),
        Kind::Choice(words) => quoted(words),
        Kind::Select => format!("[a word, or a rule with a number](#{})", anchor(path)),
        Kind::Biases => format!("[a flag, or a word](#{})", anchor(path)),
        Kind::Activation(_) => format!("[a word, or an expression](#{})", anchor(path)),
        Kind::Format(_) => {
            "[a name, or a table](SEMANTICS.md#what-do-quantized-experts-compute)".to_string()
        }
        Kind::Table(_) => format!("[table](#{})", anchor(path)),
        Kind::List(_) => format!("[array of tables](#{})", anchor(path)),
    }
}

/// Returns the heading anchor of a path.
fn anchor(path: &str) -> String {
    path.replace('.', "")
}

fn quoted(words: &[&str]) -> String {
    let words = words.iter().map(|word| format!("`\"{word}\"`"));
    words.collect::<Vec<_>>().join(", ")
}

/// Wraps a paragraph to the width of a page.
fn wrapped(text: &str) -> String {
    let (mut lines, mut line) = (String::new(), String::new());
    for word in text.split_whitespace() {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > COLUMNS {
            lines += &(std::mem::take(&mut line) + "\n");
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line += word;
    }
    lines + &line
}

/// Escapes bars, which would end a table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

/// Writes the rows of a table of the spec, then those of the tables inside it.
fn describe(section: &Section, path: &str, in_list: bool, sources: &Sources, page: &mut String) {
    let header = match (path, in_list) {
        ("", _) => "Top level".to_string(),
        (path, true) => format!("`[[{path}]]`"),
        (path, false) => format!("`[{path}]`"),
    };
    // Writing to a string does not fail.
    let _ = write!(page, "\n## {header}\n\n");
    let _ = writeln!(page, "{}\n", wrapped(&sources.docs.of_table(path)));
    let _ = writeln!(
        page,
        "| Key | Value | Default | Meaning | Models |\n|---|---|---|---|---|"
    );
    for key in &section.keys {
        let full = join(path, key.name);
        let default = sources.default(&full, key, in_list);
        let meaning = sources.docs.of_key(&full);
        let models = sources.models.of_key(&full);
        let cells = [
            format!("`{}`", key.name),
            typed(&full, &key.kind, !sources.docs.words(&full).is_empty()),
            default,
            meaning,
            models,
        ];
        let _ = writeln!(page, "| {} |", cells.map(|text| cell(&text)).join(" | "));
    }
    for key in &section.keys {
        values(&join(path, key.name), &key.kind, sources, page);
    }
    for key in &section.keys {
        let full = join(path, key.name);
        match &key.kind {
            Kind::Table(inner) => describe(inner, &full, in_list, sources, page),
            Kind::List(inner) => describe(inner, &full, true, sources, page),
            _ => {}
        }
    }
}

/// Writes the words of a key that has some, each with its meaning.
fn values(path: &str, kind: &Kind, sources: &Sources, page: &mut String) {
    let listed = matches!(
        kind,
        Kind::Choice(_) | Kind::Select | Kind::Activation(_) | Kind::Biases
    );
    let words = sources.docs.words(path);
    if !listed || words.is_empty() {
        return;
    }
    let _ = write!(
        page,
        "\n### `{path}`\n\n| Value | Meaning | Models |\n|---|---|---|\n"
    );
    for word in words {
        let models = sources.models.of_word(path, &word.name);
        let cells = [format!("`{}`", word.name), word.meaning.clone(), models];
        let _ = writeln!(page, "| {} |", cells.map(|text| cell(&text)).join(" | "));
    }
}

#[test]
fn the_page_lists_every_key() {
    let path = root().join("docs/SPEC.md");
    let page = std::fs::read_to_string(&path).expect("the page");
    let (before, listed) = page.split_once(BEGIN).expect("where the tables begin");
    let mut wanted = String::new();
    describe(&ROOT, "", false, &Sources::read(), &mut wanted);
    if std::env::var_os("BLESS").is_some() {
        let page = [before, BEGIN, &wanted].concat();
        return std::fs::write(&path, page).expect("a writable tree");
    }
    let missing: Vec<&str> = wanted
        .lines()
        .filter(|line| !listed.contains(line))
        .collect();
    assert!(
        listed == wanted,
        "docs/SPEC.md is not what the structs say: cargo xtask bless; it lacks\n{}",
        missing.join("\n")
    );
}
