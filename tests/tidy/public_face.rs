//! Whoever depends on `moesaic` can name, and look up, every type that its signatures name.
//!
//! The sources are read as rustfmt leaves them: items begin in the first column, their members four
//! columns on. Hidden is what has `#[doc(hidden)]` where it is declared. On a re-export of another
//! crate's re-export rustdoc ignores the attribute.

use super::names::{declared, public_types};
use super::{files, read, root};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Traits that seal another trait, which rustdoc is meant to show without a page.
const SEALS: [&str; 1] = ["Sealed"];

/// Crates that nothing of the facade's signatures can come from.
const APART: [&str; 4] = ["cli", "codegen/macros", "codegen/rustgen", "targets/sim"];

#[test]
fn signatures_name_types_that_have_pages() {
    let face = Face::of_the_facade();
    let mut all = public_types();
    all.retain(|_, files| files.iter().any(|file| !is_apart(file)));
    let mut leaks = BTreeMap::new();
    let mut looked = 0;
    for folder in ["codegen", "runtime", "src", "targets"] {
        for path in files(&root().join(folder), &[".rs"]) {
            for (owner, signature) in signatures(&code(&path)) {
                if !face.has(&path, &owner) {
                    continue;
                }
                looked += 1;
                for name in words(&signature).filter(|name| all.contains_key(*name)) {
                    if !face.names.contains(name) && !SEALS.contains(&name) {
                        let at = format!("{}: {owner}: {}", path.display(), signature.trim());
                        leaks.entry(name.to_string()).or_insert(at);
                    }
                }
            }
        }
    }
    assert!(looked > 2000, "only {looked} signatures were read");
    assert!(
        leaks.is_empty(),
        "these types are in public signatures and have no page under `moesaic`; give each a \
         re-export in src/ with an example, or hide what names it: {leaks:#?}"
    );
}

fn is_apart(file: &str) -> bool {
    APART.iter().any(|folder| file.starts_with(folder))
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

/// Pages, examples, and the bindings for other languages use what has a page.
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
    for door in ["c", "candle", "python"] {
        let sources = root().join("interop").join(door).join("src");
        shown.extend(files(&sources, &[".rs"]));
    }
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

/// The types and functions under `moesaic`.
#[derive(Default)]
struct Face {
    names: BTreeSet<String>,
    /// The types by the source folder of their crate, whose files may all have methods of them.
    types: BTreeSet<(PathBuf, String)>,
    /// The functions by their file.
    functions: BTreeSet<(PathBuf, String)>,
    /// The modules whose items are all taken.
    taken: BTreeSet<PathBuf>,
    /// The items of each file that was read.
    items: BTreeMap<PathBuf, Rc<Vec<String>>>,
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
        face.take_module(&root().join("src/lib.rs"));
        face
    }

    /// Returns true if a type, or a function of this file, has a page.
    fn has(&self, path: &Path, name: &str) -> bool {
        let name = name.to_string();
        self.types.contains(&(source_folder(path), name.clone()))
            || self.functions.contains(&(path.to_path_buf(), name))
    }

    /// Takes all public items of a module's file, with what it re-exports.
    fn take_module(&mut self, path: &Path) {
        if !self.taken.insert(path.to_path_buf()) {
            return;
        }
        for item in &*self.items(path) {
            self.take_item(path, item, None);
        }
    }

    /// Takes an item, or if there is a name what the item has of that name.
    fn take_item(&mut self, path: &Path, item: &str, name: Option<&str>) {
        let wanted = |own: &str| name.is_none_or(|name| name == own);
        let first = item.lines().next().unwrap_or_default();
        if let Some(own) = declared(first).filter(|own| wanted(own)) {
            self.names.insert(own.to_string());
            self.types.insert((source_folder(path), own.to_string()));
        } else if let Some(own) = function(first).filter(|own| wanted(own)) {
            self.functions.insert((path.to_path_buf(), own.to_string()));
        } else if let Some(module) = first.strip_prefix("pub mod ") {
            let own = module.trim_end_matches([';', ' ', '{', '}']);
            match module_file(path, own).filter(|_| module.ends_with(';')) {
                Some(file) if wanted(own) => self.take_module(&file),
                Some(_) => {}
                None => self.take_uses(path, item, name),
            }
        } else {
            self.take_uses(path, item, name);
        }
    }

    /// Takes the re-exports of an item.
    fn take_uses(&mut self, path: &Path, item: &str, name: Option<&str>) {
        for used in item.split("pub use ").skip(1) {
            let used = used.split(';').next().unwrap_or_default();
            let (from, list) = match used.split_once("::{") {
                Some((from, list)) => (from, list.trim_end_matches('}')),
                None => used.rsplit_once("::").unwrap_or(("", used)),
            };
            // Nobody's here are those of other projects.
            let Some(source) = self.source_of(path, from).filter(|source| source != path) else {
                continue;
            };
            for used in list
                .split(',')
                .map(str::trim)
                .filter(|used| !used.is_empty())
            {
                match (used, name) {
                    ("*", None) => self.take_module(&source),
                    ("*", Some(name)) => self.take(&source, name),
                    (used, Some(name)) if used != name => {}
                    (used, _) => self.take(&source, used),
                }
            }
        }
    }

    /// Takes what a module's file has of a name.
    fn take(&mut self, path: &Path, name: &str) {
        for item in &*self.items(path) {
            self.take_item(path, item, Some(name));
        }
    }

    fn items(&mut self, path: &Path) -> Rc<Vec<String>> {
        let read = || Rc::new(items(&code(path)));
        Rc::clone(self.items.entry(path.to_path_buf()).or_insert_with(read))
    }

    /// Returns the file of the module that a path names.
    fn source_of(&self, path: &Path, from: &str) -> Option<PathBuf> {
        let mut parts = from.split("::");
        let first = parts.next()?;
        let first = match self.crates.get(first) {
            Some(source) => source.join("lib.rs"),
            None => module_file(path, first)?,
        };
        parts.try_fold(first, |file, part| module_file(&file, part))
    }
}

/// Returns the `src` that a file is in.
fn source_folder(path: &Path) -> PathBuf {
    let source = path.ancestors().find(|folder| folder.ends_with("src"));
    source.unwrap_or(path).to_path_buf()
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

/// Returns the text of a file without its tests, which are at its end.
fn code(path: &Path) -> String {
    let text = read(path);
    let code = text.split("#[cfg(test)]\nmod tests {").next();
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
