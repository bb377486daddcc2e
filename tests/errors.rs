//! Errors between crates are types: callers tell them apart by matching, never by reading text.

use super::tidy::files;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders whose crates somebody uses from another crate; tests and tools may fail with text.
const FOLDERS: [&str; 8] = [
    "codegen",
    "runtime",
    "targets",
    "src",
    "cli/src",
    "interop/c/src",
    "interop/candle/src",
    "interop/python/src",
];

/// Declarations that other crates may see; a name of one crate says `pub(crate)`.
const PUBLIC: [&str; 6] = [
    "pub fn ",
    "pub unsafe fn ",
    "pub const fn ",
    "pub async fn ",
    "pub extern ",
    "pub type ",
];

/// The errors of [`std::str::FromStr`] and [`TryFrom`], where they are text.
const ASSOCIATED: [&str; 2] = ["type Err = String;", "type Error = String;"];

fn sources() -> impl Iterator<Item = PathBuf> {
    let folders = FOLDERS
        .iter()
        .map(|folder| Path::new(crate::ROOT).join(folder));
    let all = folders.flat_map(|folder| files(&folder, &[".rs"]));
    all.filter(|path| {
        let path = path.strip_prefix(crate::ROOT).unwrap_or(path);
        let mut folders = path.components().map(|part| part.as_os_str());
        !folders.any(|folder| {
            ["tests", "benches", "examples"]
                .iter()
                .any(|name| folder == *name)
        })
    })
}

/// Returns the declarations of a file that other crates may see and that fail with text.
fn text_errors(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut in_trait = false;
    let lines: Vec<&str> = source.lines().collect();
    for (number, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        in_trait |= line.starts_with("pub trait ") || line.starts_with("pub unsafe trait ");
        in_trait &= *line != "}";
        let public = PUBLIC.iter().any(|start| code.starts_with(start));
        let of_trait = in_trait && (code.starts_with("fn ") || code.starts_with("unsafe fn "));
        let declared = (public || of_trait).then(|| declaration(&lines[number..]));
        if ASSOCIATED.contains(&code) || declared.is_some_and(|text| fails_with_text(&text)) {
            found.push(format!("{}: {code}", number + 1));
        }
    }
    found
}

/// Returns the text from a declaration's first line to its body or its end.
fn declaration(lines: &[&str]) -> String {
    let mut text = String::new();
    for line in lines {
        text.extend([line.trim(), " "]);
        if line.ends_with(['{', ';', '}']) {
            break;
        }
    }
    text
}

/// Returns true if the text names a `Result` whose error is a `String`.
fn fails_with_text(declaration: &str) -> bool {
    let results = declaration.match_indices("Result<");
    results.into_iter().any(|(start, name)| {
        let arguments = arguments(&declaration[start + name.len()..]);
        let arguments = arguments.trim_end_matches([',', ' ']);
        arguments.ends_with(", String") || arguments.ends_with(", &'static str")
    })
}

/// Returns the text up to the `>` that closes a list of types.
fn arguments(text: &str) -> &str {
    let mut depth = 1;
    let mut before = ' ';
    for (at, c) in text.char_indices() {
        match c {
            '<' => depth += 1,
            // The arrow of a function closes nothing.
            '>' if before != '-' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &text[..at];
        }
        before = c;
    }
    text
}

#[test]
fn errors_between_crates_are_types() {
    let mut found = Vec::new();
    for path in sources() {
        let text = fs::read_to_string(&path).unwrap();
        let short = path.strip_prefix(crate::ROOT).unwrap_or(&path).display();
        found.extend(
            text_errors(&text)
                .iter()
                .map(|line| format!("{short}:{line}")),
        );
    }
    assert!(
        found.is_empty(),
        "text as an error: make it an enum, or `pub(crate)` if only its caller wraps it:\n{}",
        found.join("\n")
    );
}

#[test]
fn text_errors_are_found_in_every_form() {
    let texts = |source: &str| text_errors(source).len();
    for wrong in [
        "pub fn a(b: &str) -> Result<(), String> {",
        "    pub fn a(\n        &self,\n    ) -> Result<Option<Vec<u8>>, String> {",
        "    pub unsafe fn a(b: fn() -> u8) -> Result<Box<dyn Fn() -> u8>, String> {",
        "pub fn a(read: impl Fn(&str) -> Result<u8, String>) {",
        "pub fn a() -> impl Iterator<Item = Result<u8, String>> {",
        "pub fn a() -> std::result::Result<\n    u8,\n    String,\n> {",
        "pub type Done = Result<(), String>;",
        "pub trait A {\n    fn a(&self) -> Result<u8, String>;\n}",
        "impl FromStr for A {\n    type Err = String;",
    ] {
        assert_eq!(texts(wrong), 1, "{wrong}");
    }
    for right in [
        "pub(crate) fn a() -> Result<(), String> {",
        "fn a() -> Result<(), String> {",
        "trait A {\n    fn a(&self) -> Result<u8, String>;\n}",
        "pub trait A {\n    fn a(&self);\n}\n\nfn b() -> Result<u8, String> {",
        "pub fn a() -> Result<HashMap<String, String>, AError> {",
        "pub fn a() -> Result<(String, String)> {",
        "pub fn a() -> io::Result<BTreeMap<String, String>> {",
    ] {
        assert_eq!(texts(right), 0, "{right}");
    }
}
