//! The rules of the house, as docs/ARCHITECTURE.md states them.

mod few_files;
mod names;
mod public_face;

use moesaic::kernel::Stem;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Which crates of the workspace a crate may depend on (tests aside).
const ALLOWED: &[(&str, &[&str])] = &[
    ("kernel", &[]),
    ("spec", &["kernel"]),
    ("dist", &["kernel", "spec"]),
    ("plan", &["kernel", "spec", "dist"]),
    ("templates", &[]),
    ("emit", &["kernel", "spec", "plan", "templates"]),
    ("rustgen", &["kernel", "spec", "plan"]),
    ("macros", &["spec", "rustgen"]),
    ("target", &["kernel"]),
    ("dl", &[]),
    ("cpu", &["kernel", "target", "dl"]),
    ("cuda", &["kernel", "target", "dl"]),
    ("rocm", &["kernel", "target", "dl"]),
    ("hardware", &[]),
    ("ptx", &["kernel", "target", "hardware", "cuda"]),
    ("fibers", &["kernel", "target", "dl", "cpu", "hardware"]),
    ("emulated", &["kernel", "target", "cpu"]),
    ("cache", &["kernel", "target"]),
    (
        "engine",
        &[
            "kernel",
            "spec",
            "dist",
            "plan",
            "emit",
            "target",
            "cache",
            "tensor",
            "collectives",
        ],
    ),
    ("planner", &["kernel", "spec", "dist", "plan"]),
    ("tensor", &["kernel"]),
    ("typed", &["kernel", "spec", "target", "tensor", "engine"]),
    ("train", &["kernel", "spec", "plan", "tensor", "engine"]),
    ("tune", &["spec", "plan", "planner", "tensor", "engine"]),
    ("reference", &["kernel", "spec", "tensor"]),
    ("weights", &["kernel", "spec", "tensor"]),
    ("collectives", &["kernel", "dist", "target", "dl"]),
    (
        "toolchain",
        &[
            "kernel",
            "target",
            "cache",
            "collectives",
            "cpu",
            "cuda",
            "rocm",
        ],
    ),
];

/// Crates that must stay pure: text in, text out.
const PURE: [&str; 6] = [
    "codegen/kernel",
    "codegen/spec",
    "codegen/dist",
    "codegen/plan",
    "codegen/emit",
    "runtime/planner",
];

fn root() -> PathBuf {
    PathBuf::from(crate::ROOT)
}

/// Every file below `folder` with one of the extensions, build output aside.
pub fn files(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let mut list = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        if path.is_dir() {
            let skipped = name.starts_with('.') || name == "target" || name.starts_with("target-");
            if !skipped {
                list.extend(files(&path, extensions));
            }
        } else if extensions.iter().any(|extension| name.ends_with(extension)) {
            list.push(path);
        }
    }
    list
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The `moesaic-*` crates below `[dependencies]` of each manifest.
fn crate_graph() -> BTreeMap<String, BTreeSet<String>> {
    let folders = ["codegen", "targets", "runtime", "templates"];
    let manifests = folders
        .iter()
        .flat_map(|f| files(&root().join(f), &["Cargo.toml"]));
    manifests.map(|path| dependencies(&read(&path))).collect()
}

fn dependencies(manifest: &str) -> (String, BTreeSet<String>) {
    let (mut section, mut name, mut list) = ("", String::new(), BTreeSet::new());
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line;
        } else if section == "[package]" && line.starts_with("name") {
            name = line
                .split('"')
                .nth(1)
                .unwrap_or_default()
                .replace("moesaic-", "");
        } else if section == "[dependencies]" {
            let dependency = line.split(['.', ' ', '=']).next().unwrap_or_default();
            list.extend(dependency.strip_prefix("moesaic-").map(str::to_string));
        }
    }
    (name, list)
}

#[test]
fn crates_depend_only_where_the_architecture_allows() {
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    for (name, dependencies) in crate_graph() {
        let may = allowed
            .get(&*name)
            .unwrap_or_else(|| panic!("crate {name} is not in the table"));
        for dependency in dependencies {
            assert!(
                may.contains(&&*dependency),
                "moesaic-{name} must not use moesaic-{dependency}"
            );
        }
    }
}

/// The modules of the engine: each imports from those before it.
const ENGINE: &[&str] = &[
    "reason",
    "error",
    "parallel",
    "statistics",
    "trace",
    "turns",
    "call",
    "memory",
    "launch",
    "numbers",
    "place",
    "shared",
    "pass",
    "device_layer",
    "tensor_list",
    "router",
    "addresses",
    "host",
    "forward",
    "into",
    "training",
    "texts",
    "tuned",
    "jit",
    "precompile",
    "engine",
    "bank",
    "stack",
    "mesh",
    "layer",
    "row_bytes",
    "expert_ranks",
    "user_expert",
    "user",
    "multi_gate",
    "by_token",
    "variants",
];

#[test]
fn modules_of_the_engine_import_from_those_below() {
    let place = |module: &str| ENGINE.iter().position(|known| *known == module);
    let source = root().join("runtime/engine/src");
    for path in files(&source, &[".rs"]) {
        let below = path.strip_prefix(&source).expect("a file of the folder");
        let folder = below.components().next().expect("a name");
        let module = Path::new(&folder).with_extension("");
        let module = module.to_string_lossy();
        if module == "lib" {
            continue;
        }
        let own = place(&module).unwrap_or_else(|| panic!("{module} has no place in the order"));
        let text = read(&path);
        let code = text.lines().filter(|line| !line.trim().starts_with("//"));
        for used in code.flat_map(|line| line.split("crate::").skip(1)) {
            let used = used
                .split(|c: char| !c.is_alphanumeric() && c != '_')
                .next();
            let used = used.unwrap_or_default();
            let below = place(used).is_some_and(|place| place < own);
            assert!(
                below,
                "{module} imports `crate::{used}`, which is not below it"
            );
        }
    }
}

/// The modules of layers over ranks, `runtime/engine/src/mesh`, by duty: each imports from those
/// before it.
const MESH: &[&str] = &[
    // Process groups, and how ranks share a parameter.
    "process_group",
    "sharding",
    "workspace_pool",
    "groups",
    "digests",
    "ranks",
    "gpus",
    "timestamp",
    // Weights of a rank.
    "shard",
    "part",
    "replicas",
    "collect",
    // Counts and layouts as plain data.
    "rows",
    "tp_peers",
    "settings",
    "all_to_all",
    "transfers",
    "routing",
    // What a layer binds.
    "cast_kernels",
    "comm_cast",
    "shadow_weights",
    "passes",
    "plan_part",
    "bound_plan",
    "layer",
    "weights",
    "reduce",
    // A call: requests in flight, its data, and what all of it use.
    "in_flight",
    "call_state",
    "mesh_call",
    "waits",
    // Counts.
    "counts",
    "global_routing",
    "applied_routing",
    "losses",
    // Transfers of rows and weights.
    "sums",
    "cast_rows",
    "gathered_weights",
    "shadows",
    "raw",
    // The passes.
    "executor",
    "calls",
];

/// The modules of the layer that users call, `runtime/engine/src/layer`: each imports from those
/// before it.
const LAYER: &[&str] = &[
    "form", "options", "saved", "strategy", "tuned", "weights", "calls",
];

#[test]
fn modules_of_a_mesh_import_from_those_below() {
    import_from_those_below("mesh", MESH);
}

#[test]
fn modules_of_a_layer_import_from_those_below() {
    import_from_those_below("layer", LAYER);
}

/// Checks that the modules of a folder of the engine import by `super::`, from those before them.
fn import_from_those_below(folder: &str, order: &[&str]) {
    let place = |module: &str| order.iter().position(|known| *known == module);
    let source = root().join("runtime/engine/src").join(folder);
    let around = format!("crate::{folder}");
    for path in files(&source, &[".rs"]) {
        let module = path.file_stem().expect("a name").to_string_lossy();
        if module == "mod" {
            continue;
        }
        let own = place(&module).unwrap_or_else(|| panic!("{module} has no place in the order"));
        let text = read(&path);
        let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        let lines = code.lines().filter(|line| !line.trim().starts_with("//"));
        for line in lines {
            // A way around the order, and one that names no module.
            assert!(
                !line.contains(&around) && !line.contains("super::{"),
                "{module} imports `{}`; name one module by `super::`",
                line.trim()
            );
            let visible = line.replace("pub(super)", "");
            for used in visible.split("super::").skip(1) {
                let used = used
                    .split(|c: char| !c.is_alphanumeric() && c != '_')
                    .next();
                let used = used.unwrap_or_default();
                assert!(
                    place(used).is_some_and(|place| place < own),
                    "{module} imports `super::{used}`, which is not below it"
                );
            }
        }
    }
}

/// Modules of the command line import each other in one direction. `lib.rs` is above all of them;
/// tests in modules may look at everything.
#[test]
fn modules_of_the_command_line_form_no_circle() {
    let source = root().join("cli/src");
    let mut imports: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for path in files(&source, &[".rs"]) {
        let below = path.strip_prefix(&source).expect("a file of the folder");
        let module = Path::new(&below.components().next().expect("a name")).with_extension("");
        let module = module.to_string_lossy().into_owned();
        // `page` is a test as a whole.
        if ["lib", "main", "page"].contains(&module.as_str()) {
            continue;
        }
        let text = read(&path);
        let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        let own = imports.entry(module.clone()).or_default();
        own.extend(imported(code).into_iter().filter(|used| *used != module));
    }
    assert!(imports.len() > 30, "{} modules", imports.len());
    // Whoever imports nothing that is left is below the others, and is taken away.
    while let Some(lowest) = imports
        .iter()
        .find(|(_, used)| used.iter().all(|used| !imports.contains_key(used)))
        .map(|(module, _)| module.clone())
    {
        imports.remove(&lowest);
    }
    assert!(imports.is_empty(), "a circle is among {imports:#?}");
}

/// Returns the modules that a text names after `crate::`, alone or in braces.
fn imported(code: &str) -> BTreeSet<String> {
    let lines = code.lines().filter(|line| !line.trim().starts_with("//"));
    let code = lines.collect::<Vec<_>>().join("\n");
    let mut modules = BTreeSet::new();
    for used in code.split("crate::").skip(1) {
        let (list, braces) = match used.strip_prefix('{') {
            Some(rest) => (rest.split('}').next().unwrap_or_default(), true),
            None => (used, false),
        };
        let names = list.split(',').take(if braces { usize::MAX } else { 1 });
        modules.extend(names.filter_map(|name| {
            let name = name.trim();
            let end = name.find(|c: char| !c.is_alphanumeric() && c != '_');
            let name = &name[..end.unwrap_or(name.len())];
            (!name.is_empty()).then(|| name.to_string())
        }));
    }
    modules
}

#[test]
fn codegen_touches_no_file_variable_or_device() {
    for folder in PURE {
        for path in files(&root().join(folder).join("src"), &[".rs"]) {
            let text = read(&path);
            let code = text.split("#[cfg(test)]").next().unwrap_or_default();
            // The page of keys is a test of the crate's own.
            if path.to_string_lossy().contains("spec/src/reference") {
                continue;
            }
            for banned in [
                "std::fs",
                "std::env",
                "std::process",
                "std::net",
                "std::time",
            ] {
                assert!(!code.contains(banned), "{} uses {banned}", path.display());
            }
        }
    }
}

#[test]
fn only_dl_opens_libraries() {
    for path in files(&root(), &["Cargo.toml"]) {
        let text = read(&path);
        let dl = path.ends_with("targets/dl/Cargo.toml") || path == root().join("Cargo.toml");
        let normal = text.split("[dev-dependencies]").next().unwrap_or_default();
        assert!(dl || !normal.contains("libloading"), "{}", path.display());
    }
}

#[test]
fn nothing_probes_the_machine_at_build_time() {
    // A user's may: it compiles kernels. That of the C library gives it its name, and asks nothing.
    let known = ["examples/new_project/build.rs", "interop/c/build.rs"];
    let known = known.map(|file| root().join(file));
    let mut found = files(&root(), &["build.rs"]);
    found.sort();
    assert_eq!(found, known);
}

#[test]
fn every_unsafe_block_says_why_it_is_sound() {
    for path in files(&root(), &[".rs"]) {
        let text = read(&path);
        let lines: Vec<&str> = text.lines().collect();
        for (i, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            if !code.contains("unsafe {") || path.ends_with("tests/tidy.rs") {
                continue;
            }
            let above = lines[i.saturating_sub(12)..=i].iter();
            let reason = above
                .clone()
                .any(|l| l.contains("SAFETY:") || l.contains("# Safety"));
            assert!(reason, "{}:{} has no SAFETY comment", path.display(), i + 1);
        }
    }
}

#[test]
fn files_stay_readable() {
    for path in files(&root(), &[".rs", ".tera"]) {
        // Generated text is as long as it is.
        if path.components().any(|part| part.as_os_str() == "golden") {
            continue;
        }
        let lines = read(&path).lines().count();
        let most = if path.extension().is_some_and(|e| e == "tera") {
            450
        } else {
            600
        };
        assert!(
            lines <= most,
            "{} has {lines} lines; split it",
            path.display()
        );
    }
}

#[test]
fn every_stem_is_everywhere() {
    for stem in Stem::all() {
        let operator = stem.operator();
        for path in [
            format!("codegen/plan/src/ops/{operator}/mod.rs"),
            format!("templates/{operator}/cpu/{stem}.c.tera"),
            format!("templates/{operator}/gpu/{stem}.cu.tera"),
            format!("docs/kernels/{stem}.md"),
            format!("tests/golden/{stem}"),
        ] {
            assert!(root().join(&path).exists(), "{path} is missing");
        }
    }
}

#[test]
fn documents_that_are_named_exist() {
    for path in files(&root(), &[".rs", ".md", ".toml", ".tera"]) {
        for word in read(&path).split(|c: char| c.is_whitespace() || "()[]`,;".contains(c)) {
            let word = word.trim_end_matches(['.', ':']);
            let named = word.starts_with("docs/") && word.ends_with(".md") && !word.contains('{');
            let placeholder = word.contains('<') || word.contains('*');
            let there = !named || placeholder || root().join(word).exists();
            assert!(there, "{} names {word}, which is missing", path.display());
        }
    }
}

/// What `autotests = false` leaves out is a part of the one binary.
#[test]
fn every_test_file_is_in_its_binary() {
    for manifest in files(&root(), &["Cargo.toml"]) {
        let folder = manifest.parent().expect("a folder").join("tests");
        let main = folder.join("main.rs");
        if !main.exists() || !read(&manifest).contains("autotests = false") {
            continue;
        }
        // The project's own tests are a package in the root's folder of that name.
        let own = folder.join("Cargo.toml");
        let manifest = if own.exists() { own } else { manifest };
        let (main, manifest) = (read(&main), read(&manifest));
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(stem) = name.strip_suffix(".rs").filter(|stem| *stem != "main") else {
                continue;
            };
            let there = main.contains(&format!("mod {stem};"))
                || manifest.contains(&format!("\"tests/{name}\""))
                || manifest.contains(&format!("path = \"{name}\""));
            assert!(there, "{} is in no test binary", entry.path().display());
        }
    }
}

/// Documentation without examples is not read for them, which takes seconds for every crate;
/// one with an example is.
#[test]
fn examples_in_documentation_are_run() {
    for manifest in files(&root(), &["Cargo.toml"]) {
        if !read(&manifest).contains("doctest = false") {
            continue;
        }
        let source = manifest.parent().expect("a folder").join("src");
        for path in files(&source, &[".rs"]) {
            let example = has_example(&read(&path));
            assert!(
                !example,
                "{} has an example: drop `doctest = false`",
                path.display()
            );
        }
    }
}

/// Whether a comment for readers has code that is Rust.
fn has_example(text: &str) -> bool {
    let lines = text.lines().map(str::trim_start);
    let comments = lines.filter_map(|l| l.strip_prefix("///").or_else(|| l.strip_prefix("//!")));
    let mut open = false;
    comments
        .filter_map(|line| line.trim_start().strip_prefix("```"))
        .any(|language| {
            open = !open;
            open && !["text", "c"].contains(&language)
        })
}

/// Crates that a user of the library builds, ours included.
const MOST_CRATES: usize = 68;

#[test]
fn the_library_stays_small() {
    let output = std::process::Command::new(env!("CARGO"))
        .args([
            "tree",
            "--offline",
            "-p",
            "moesaic",
            "-e",
            "normal,build",
            "--prefix",
            "none",
        ])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    let text = String::from_utf8_lossy(&output.stdout);
    for part in [
        "cudarc",
        "moesaic-emulated",
        "moesaic-fibers",
        "moesaic-ptx",
        "moesaic-hardware",
        "moesaic-planner",
        "moesaic-reference",
        "rayon",
        "tar v",
    ] {
        assert!(
            !text.contains(part),
            "{part} is only for those who ask for it"
        );
    }
    let crates: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| line.split(" (").next())
        .filter(|line| !line.is_empty())
        .collect();
    assert!(
        !crates.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let count = crates.len();
    assert!(count <= MOST_CRATES, "{count} crates: {crates:?}");
}
