//! Whoever depends on `moesaic` can name, and look up, every type that its signatures name.
//!
//! The sources are read as rustfmt leaves them: items begin in the first column, their members four
//! columns on. Hidden is what has `#[doc(hidden)]` where it is declared. On a re-export of another
//! crate's re-export rustdoc ignores the attribute.

use super::names::{declared, public_types};
use super::{files, read, root};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A type of a part that has the name of one of the facade's, and is none of its own.
const OTHER: (&str, &str) = ("Engine", "runtime/engine/src/engine.rs");

/// Traits that seal another trait, which rustdoc is meant to show without a page.
const SEALS: [&str; 1] = ["Sealed"];

#[test]
fn signatures_name_types_that_have_pages() {
    let mut face = Face::of_the_facade();
    let all: BTreeSet<String> = public_types().into_keys().collect();
    let mut leaks = BTreeMap::new();
    let mut looked = 0;
    for folder in ["codegen", "runtime", "src", "targets"] {
        for path in files(&root().join(folder), &[".rs"]) {
            let place = path.strip_prefix(root()).unwrap().display().to_string();
            let text = code(&path);
            for (owner, signature) in signatures(&text) {
                let public = face.names.contains(&owner) && OTHER != (&*owner, &*place);
                if !public {
                    continue;
                }
                looked += 1;
                for name in words(&signature).filter(|name| all.contains(*name)) {
                    if !face.names.contains(name) && !SEALS.contains(&name) {
                        let at = format!("{place}: {owner}: {}", signature.trim());
                        leaks.entry(name.to_string()).or_insert(at);
                    }
                }
            }
        }
    }
    assert!(looked > 2000, "only {looked} signatures were read");
    face.names.retain(|name| all.contains(name));
    assert!(face.names.len() > 300, "{} types", face.names.len());
    assert!(
        leaks.is_empty(),
        "these types are in public signatures and have no page under `moesaic`; give each a \
         re-export in src/ with an example, or hide what names it: {leaks:#?}"
    );
}

#[test]
fn hidden_members_are_passed_over() {
    let text = "\
pub struct A {
    /// Seen.
    pub b: Vec<B>,
    #[doc(hidden)]
    #[serde(
        default
    )]
    pub c: C,
    d: D,
}

pub enum E {
    F(G),
    H {
        #[doc(hidden)]
        i: I,
        j: J,
    },
    #[doc(hidden)]
    K {
        l: L,
    },
}

#[doc(hidden)]
impl A {
    pub fn m(&self) -> M {
        N
    }
}

impl<T> A<T> {
    pub fn o(
        &self,
    ) -> O {
        P
    }
}
";
    let found: Vec<String> = signatures(text)
        .iter()
        .flat_map(|(owner, text)| {
            words(text)
                .filter(|w| w.len() == 1 && w.chars().all(char::is_uppercase))
                .map(|word| format!("{owner}{word}"))
                .collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(found, ["AB", "EG", "EJ", "AO"]);
}

/// Pages and examples for users use what has a page.
#[test]
fn users_are_shown_public_paths_alone() {
    let facade = read(&root().join("src/lib.rs"));
    let hidden: Vec<&str> = facade
        .lines()
        .filter_map(|line| line.strip_prefix("pub use moesaic_")?.strip_suffix(';'))
        .filter_map(|used| used.split_once(" as "))
        .map(|(_, name)| name)
        .collect();
    assert!(hidden.len() > 10, "{hidden:?}");
    let mut shown = files(&root().join("examples"), &[".rs"]);
    shown.extend(files(&root().join("src"), &[".rs"]));
    for page in [
        "README",
        "docs/ADAPTIVE",
        "docs/GUIDE",
        "docs/SERVING",
        "docs/TRAINING",
    ] {
        shown.push(root().join(page).with_extension("md"));
    }
    for path in shown {
        for line in read(&path).lines() {
            for used in line.split("moesaic::").skip(1) {
                let name = words(used).next().unwrap_or_default();
                assert!(
                    !hidden.contains(&name) || !used.starts_with(name),
                    "{} shows `moesaic::{name}`, which is hidden",
                    path.display()
                );
            }
        }
    }
}

/// The names under `moesaic`, of types and functions.
#[derive(Default)]
struct Face {
    names: BTreeSet<String>,
    read: BTreeSet<PathBuf>,
    /// The source folder of each crate, by the name that Rust uses.
    crates: BTreeMap<String, PathBuf>,
}

impl Face {
    fn of_the_facade() -> Face {
        let mut face = Face::default();
        for folder in ["codegen", "runtime", "targets"] {
            for manifest in files(&root().join(folder), &["Cargo.toml"]) {
                let text = read(&manifest);
                let name = text.split('"').nth(1).unwrap_or_default();
                let source = manifest.with_file_name("src");
                face.crates.insert(name.replace('-', "_"), source);
            }
        }
        face.take_file(&root().join("src/lib.rs"));
        face
    }

    /// Takes the public items of a module's file, and of those that it re-exports.
    fn take_file(&mut self, path: &Path) {
        if !path.exists() || !self.read.insert(path.to_path_buf()) {
            return;
        }
        let text = code(path);
        for item in items(&text) {
            let first = item.lines().next().unwrap_or_default().trim_start();
            if let Some(name) = declared(first).or_else(|| function(first)) {
                self.names.insert(name.to_string());
            } else if let Some(used) = first.strip_prefix("pub use ") {
                let used = item.trim_start().strip_prefix("pub use ").unwrap_or(used);
                self.take_use(path, used.trim_end().trim_end_matches(';'));
            } else if let Some(module) = first.strip_prefix("pub mod ") {
                match module.strip_suffix(';') {
                    Some(module) => self.take_module(path, module),
                    None => self.take_inline(path, &item),
                }
            }
        }
    }

    /// Takes what a module in braces re-exports.
    fn take_inline(&mut self, path: &Path, item: &str) {
        let uses = item.split("pub use ").skip(1);
        for used in uses {
            self.take_use(path, used.split(';').next().unwrap_or_default());
        }
    }

    fn take_use(&mut self, path: &Path, used: &str) {
        let (from, list) = match used.split_once("::{") {
            Some((from, list)) => (from, list.trim_end_matches('}')),
            None => used.rsplit_once("::").unwrap_or(("", used)),
        };
        let source = self.source_of(path, from);
        for name in list.split(',').map(str::trim).filter(|n| !n.is_empty()) {
            match (name, source.clone()) {
                ("*", Some(file)) => self.take_file(&file),
                (name, Some(file)) if name.chars().all(|c| !c.is_uppercase()) => {
                    self.names.insert(name.to_string());
                    self.take_module(&file, name);
                }
                _ => drop(self.names.insert(name.to_string())),
            }
        }
    }

    /// Returns the file of the module that a path names.
    fn source_of(&self, path: &Path, from: &str) -> Option<PathBuf> {
        let mut parts = from.split("::");
        let first = parts.next()?;
        match self.crates.get(first) {
            Some(source) => Some(source.join("lib.rs")),
            None => module_file(path, first),
        }
    }

    fn take_module(&mut self, path: &Path, name: &str) {
        if let Some(file) = module_file(path, name) {
            self.take_file(&file);
        }
    }
}

/// Returns the file of a module that another file declares.
fn module_file(path: &Path, name: &str) -> Option<PathBuf> {
    let stem = path.file_stem()?.to_string_lossy().into_owned();
    let folder = match &*stem {
        "lib" | "mod" => path.parent()?.to_path_buf(),
        _ => path.with_extension(""),
    };
    let files = [format!("{name}.rs"), format!("{name}/mod.rs")].map(|file| folder.join(file));
    files.into_iter().find(|file| file.exists())
}

/// Returns the text of a file without its tests.
fn code(path: &Path) -> String {
    let text = read(path);
    let code = text.split("#[cfg(test)]\nmod ").next();
    code.unwrap_or_default().to_string()
}

/// Returns the items of a text that are not hidden, without their comments and attributes.
fn items(text: &str) -> Vec<String> {
    blocks(text.lines(), 0)
}

/// Returns the blocks of lines that begin at a column, without those that are hidden.
fn blocks<'a>(lines: impl Iterator<Item = &'a str>, column: usize) -> Vec<String> {
    let mut blocks: Vec<String> = Vec::new();
    let (mut hidden, mut attribute, mut keeps) = (false, false, false);
    for line in lines {
        let (text, indent) = (line.trim(), line.len() - line.trim_start().len());
        if attribute {
            attribute = !text.ends_with(']');
        } else if text.is_empty() || text.starts_with("//") {
            continue;
        } else if indent == column && text.starts_with("#[") {
            hidden |= text == "#[doc(hidden)]";
            attribute = !text.ends_with(']');
        } else if indent == column && !text.starts_with([')', '}', '>', '{']) && text != "where" {
            keeps = !hidden;
            hidden = false;
            if keeps {
                blocks.push(line.to_string());
            }
        } else if let (true, Some(block)) = (keeps, blocks.last_mut()) {
            block.push('\n');
            block.push_str(line);
        }
    }
    blocks
}

/// Returns the public signatures of a text: the type or function that each belongs to, and its
/// words.
fn signatures(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for item in items(text) {
        let (head, body) = item.split_once("{\n").unwrap_or((&item, ""));
        let first = head.lines().next().unwrap_or_default();
        if let Some(name) = function(first) {
            found.push((name.to_string(), head.to_string()));
        } else if let Some(name) = declared(first) {
            let name = name.to_string();
            let members = blocks(body.lines(), 4);
            if first.starts_with("pub struct") {
                // The fields of a tuple are on its first line.
                let tuple = first.split_once('(').map_or("", |(_, fields)| fields);
                let tuple = tuple.split(", ").filter(|field| field.starts_with("pub "));
                found.extend(tuple.map(|field| (name.clone(), field.to_string())));
                let fields = members.iter().filter(|field| is_public(field));
                found.extend(fields.map(|field| (name.clone(), field.clone())));
            } else if first.starts_with("pub enum") {
                found.extend(members.iter().flat_map(|variant| fields_of(&name, variant)));
            } else {
                found.push((name.clone(), head.to_string()));
                found.extend(
                    members
                        .iter()
                        .map(|member| (name.clone(), signature(member))),
                );
            }
        } else if let Some(name) = implemented(head) {
            let members = blocks(body.lines(), 4);
            let public = members.iter().filter(|member| is_public(member));
            found.extend(public.map(|member| (name.clone(), signature(member))));
        }
    }
    found
}

fn is_public(member: &str) -> bool {
    member.trim_start().starts_with("pub ")
}

/// Returns the fields of a variant, without its own name.
fn fields_of(name: &str, variant: &str) -> Vec<(String, String)> {
    let name = name.to_string();
    match variant.split_once("{\n") {
        Some((_, body)) => {
            let fields = blocks(body.lines(), 8).into_iter();
            fields.map(|field| (name.clone(), field)).collect()
        }
        None => {
            let fields = variant.split_once('(').map_or("", |(_, fields)| fields);
            vec![(name, fields.to_string())]
        }
    }
}

/// Returns a member without the body of a function.
fn signature(member: &str) -> String {
    let end = member.find(" {\n").or_else(|| member.find(" {}"));
    let member = &member[..end.unwrap_or(member.len())];
    // A constant's value is no part of its type.
    member.split(" = ").next().unwrap_or_default().to_string()
}

/// Returns the name of a public function that a line declares.
fn function(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("pub ")?;
    let rest = rest.strip_prefix("const ").unwrap_or(rest);
    let rest = rest.strip_prefix("unsafe ").unwrap_or(rest);
    let name = rest.strip_prefix("fn ")?;
    name.split(['(', '<']).next()
}

/// Returns the type whose own methods an `impl` has; `None` for those of a trait.
fn implemented(head: &str) -> Option<String> {
    let rest = head.strip_prefix("impl")?;
    if rest.contains(" for ") {
        return None;
    }
    let mut depth = 0;
    let start = rest.find(|c: char| {
        depth += i32::from(c == '<') - i32::from(c == '>');
        depth == 0 && c == ' '
    })?;
    words(&rest[start..]).next().map(str::to_string)
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    let apart = |c: char| !c.is_alphanumeric() && c != '_';
    text.split(apart).filter(|word| !word.is_empty())
}
