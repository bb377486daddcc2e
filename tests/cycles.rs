//! The modules of every crate import each other in one direction.

use crate::tidy::files;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The path of a module below its crate's root, which is the empty one.
type Name = Vec<String>;

/// An import of a module.
struct Use {
    /// Whether others see it there. A parent that shows what its children have needs nothing of
    /// them.
    public: bool,
    /// The path of the imported item from the root of the crate.
    path: Name,
    /// The name that it has in the module.
    alias: String,
}

/// The imports of a module.
#[derive(Default)]
struct Module {
    uses: Vec<Use>,
    /// Paths in its code.
    paths: Vec<Name>,
}

#[test]
fn modules_import_each_other_in_one_direction() {
    let root = PathBuf::from(crate::ROOT);
    let folders = [
        "codegen",
        "targets",
        "runtime",
        "templates",
        "cli",
        "src",
        "interop",
    ];
    let mut found = BTreeMap::new();
    for folder in folders {
        for path in files(&root.join(folder), &["lib.rs"]) {
            let source = path.parent().expect("a folder");
            let name = source.strip_prefix(&root).expect("below the root");
            let inside = circles(&modules(source));
            if !inside.is_empty() {
                found.insert(name.display().to_string(), inside);
            }
        }
    }
    assert_eq!(
        found,
        BTreeMap::new(),
        "modules that import each other in a circle"
    );
}

#[test]
fn a_circle_is_seen_through_names_that_a_parent_shows() {
    let text = [
        ("", "mod a;\nmod b;\npub use a::A;"),
        ("a", "use crate::b::B;\npub struct A(B);"),
        ("b", "pub struct B;\nfn f() -> crate::A { todo!() }"),
        (
            "c",
            "use crate::{A, b};\n// use crate::d;\n#[cfg(test)]\nmod tests { use crate::d; }",
        ),
        ("d", "use super::c::C as Other;"),
    ];
    let names: BTreeSet<Name> = text.iter().map(|(name, _)| segments(name)).collect();
    let module =
        |(name, text): &(&str, &str)| (segments(name), module(&segments(name), text, &names));
    let inside: Vec<String> = circles(&text.iter().map(module).collect())
        .into_iter()
        .collect();
    assert_eq!(inside, ["a", "b"]);
}

/// Returns the modules of a crate's `src`, tests left out.
fn modules(source: &Path) -> BTreeMap<Name, Module> {
    let mut texts = BTreeMap::new();
    for path in files(source, &[".rs"]) {
        let below = path
            .strip_prefix(source)
            .expect("a file of the folder")
            .with_extension("");
        let mut name: Name = below
            .iter()
            .map(|part| part.to_string_lossy().into_owned())
            .collect();
        let of_tests = |part: &String| ["tests", "testing", "main"].contains(&part.as_str());
        if name.iter().any(of_tests) {
            continue;
        }
        if name == ["lib"] || name.last().is_some_and(|last| last == "mod") {
            name.pop();
        }
        let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        texts.insert(name, text);
    }
    let names: BTreeSet<Name> = texts.keys().cloned().collect();
    let module = |(name, text): (Name, String)| {
        let module = module(&name, &text, &names);
        (name, module)
    };
    texts.into_iter().map(module).collect()
}

/// Reads the imports of a module's text.
fn module(name: &Name, text: &str, names: &BTreeSet<Name>) -> Module {
    let mut module = Module::default();
    let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let lines = code
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    let code = lines.collect::<Vec<_>>().join("\n");
    let mut rest = code.as_str();
    while let Some(at) = next_use(rest) {
        let (before, found) = rest.split_at(at);
        module.paths.extend(paths(name, before, names));
        let (tree, after) = found.split_once(';').unwrap_or((found, ""));
        let (head, tree) = tree.split_once("use ").unwrap_or_default();
        for (path, alias) in leaves(tree) {
            module
                .uses
                .extend(absolute(name, &path, names).map(|path| Use {
                    public: head.contains("pub"),
                    path,
                    alias,
                }));
        }
        rest = after;
    }
    module.paths.extend(paths(name, rest, names));
    module
}

/// Returns where the next `use` begins, with what stands before it on its line.
fn next_use(code: &str) -> Option<usize> {
    let mut start = 0;
    for line in code.split_inclusive('\n') {
        let head = line.trim_start();
        let head = head.strip_prefix("pub").map_or(head, |rest| {
            let inside = rest.strip_prefix('(').and_then(|rest| rest.split_once(')'));
            inside.map_or(rest, |(_, rest)| rest).trim_start()
        });
        if head.starts_with("use ") {
            return Some(start);
        }
        start += line.len();
    }
    None
}

/// Returns the paths that a tree of imports names, each with its name in the module.
fn leaves(tree: &str) -> Vec<(Name, String)> {
    let tree = tree.trim();
    if let Some((prefix, list)) = tree.split_once('{') {
        let list = list.strip_suffix('}').unwrap_or(list);
        let prefix = segments(prefix);
        let inside = parts(list).into_iter().flat_map(leaves);
        return inside
            .map(|(path, name)| ([&prefix[..], &path].concat(), name))
            .collect();
    }
    let (path, alias) = match tree.split_once(" as ") {
        Some((path, alias)) => (segments(path), Some(alias.trim().to_string())),
        None => (segments(tree), None),
    };
    // `self` in braces is the module before them.
    let path: Name = match path.split_last() {
        Some((last, head)) if last == "self" && !head.is_empty() => head.to_vec(),
        _ => path,
    };
    let alias = alias.or(path.last().cloned()).unwrap_or_default();
    if path.is_empty() {
        Vec::new()
    } else {
        vec![(path, alias)]
    }
}

/// Splits a list at the commas outside of braces.
fn parts(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, sign) in list.char_indices() {
        match sign {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[start..]);
    parts
}

fn segments(path: &str) -> Name {
    let parts = path
        .split("::")
        .map(str::trim)
        .filter(|part| !part.is_empty());
    parts.map(str::to_string).collect()
}

/// Returns the paths in code that begin at the crate's root or beside the module.
fn paths(own: &Name, code: &str, names: &BTreeSet<Name>) -> Vec<Name> {
    let word = |c: char| !c.is_alphanumeric() && c != '_' && c != ':';
    let found = code.split(word).filter(|path| path.contains("::"));
    let found = found.map(segments);
    let begins = |path: &Name| ["crate", "super", "self"].contains(&path[0].as_str());
    let found = found.filter(|path| !path.is_empty() && begins(path));
    found
        .filter_map(|path| absolute(own, &path, names))
        .collect()
}

/// Returns a path from the crate's root on; `None` for one of another crate.
fn absolute(own: &Name, path: &Name, names: &BTreeSet<Name>) -> Option<Name> {
    let (mut base, mut rest) = (own.clone(), &path[..]);
    match rest.first()?.as_str() {
        "crate" => (base, rest) = (Name::new(), &rest[1..]),
        "self" | "super" => {
            while let Some(first) = rest
                .first()
                .filter(|part| ["self", "super"].contains(&part.as_str()))
            {
                if first == "super" {
                    base.pop();
                }
                rest = &rest[1..];
            }
        }
        first => {
            let child = [&base[..], &[first.to_string()]].concat();
            if !names.contains(&child) {
                return None;
            }
        }
    }
    Some([&base, rest].concat())
}

/// Returns the module that has what a path names, through the names that modules on the way take
/// from others.
fn owner(modules: &BTreeMap<Name, Module>, path: &[String], steps: usize) -> Option<Name> {
    let length = (0..=path.len())
        .rev()
        .find(|length| modules.contains_key(&path[..*length]))?;
    let (module, rest) = path.split_at(length);
    let shown = rest.first().filter(|_| steps < 8).and_then(|name| {
        let uses = &modules[module].uses;
        uses.iter()
            .find(|used| used.alias == *name && used.path != path)
    });
    match shown {
        Some(used) => owner(modules, &[&used.path, &rest[1..]].concat(), steps + 1),
        None => Some(module.to_vec()),
    }
}

/// Returns the modules that import themselves over others.
fn circles(modules: &BTreeMap<Name, Module>) -> BTreeSet<String> {
    let imports = |(name, module): (&Name, &Module)| {
        let used = module.uses.iter().filter(|used| !used.public);
        let paths = used.map(|used| &used.path).chain(&module.paths);
        let owners = paths.filter_map(|path| owner(modules, path, 0));
        (
            name.clone(),
            owners
                .filter(|owner| owner != name)
                .collect::<BTreeSet<Name>>(),
        )
    };
    let imports: BTreeMap<Name, BTreeSet<Name>> = modules.iter().map(imports).collect();
    let reaches_itself = |start: &&Name| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![*start]);
        while let Some(module) = next.pop() {
            let new = imports[module].iter().filter(|used| seen.insert(*used));
            next.extend(new.collect::<Vec<_>>());
        }
        seen.contains(start)
    };
    let inside = imports.keys().filter(reaches_itself);
    inside
        .map(|name| {
            if name.is_empty() {
                "lib".to_string()
            } else {
                name.join("::")
            }
        })
        .collect()
}
