//! The layers that both builds get.

use crate::archive;
use crate::literals::literals;
use moesaic_spec::hf;
use moesaic_spec::{LayerSpec, testing};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A layer, and where it is from.
#[derive(Clone, Debug)]
pub struct Case {
    /// `tests/conformance/saved.rs:15`, `sample-7`.
    pub name: String,
    /// The layer.
    pub spec: LayerSpec,
}

/// The layers of examples, tests and model families of the checkout at `root`,
/// and `samples` random ones from the seed on; each once, in an order that
/// mixes them.
pub fn cases(root: &Path, seed: u64, samples: u64) -> Vec<Case> {
    let random = (seed..seed + samples).map(|seed| Case {
        name: format!("sample-{seed}"),
        spec: testing::sample(seed),
    });
    let kinds = [
        examples(root),
        random.collect(),
        written_in_tests(root),
        families(),
    ];
    let mut seen = BTreeSet::new();
    let mut cases = mixed(kinds);
    cases.retain(|case| seen.insert(case.spec.to_toml()));
    cases
}

/// One of each kind in turn, so that a run that is cut short has seen all.
fn mixed(kinds: [Vec<Case>; 4]) -> Vec<Case> {
    let most = kinds.iter().map(Vec::len).max().unwrap_or(0);
    let turns = (0..most).flat_map(|i| kinds.iter().filter_map(move |kind| kind.get(i)));
    turns.cloned().collect()
}

fn examples(root: &Path) -> Vec<Case> {
    let paths = files(&root.join("examples/specs"), "toml");
    let read = |path: &PathBuf| {
        let spec = LayerSpec::from_toml(&fs::read_to_string(path).ok()?).ok()?;
        Some(Case {
            name: relative(root, path),
            spec,
        })
    };
    paths.iter().filter_map(read).collect()
}

/// Every string in a test that is a valid spec, or becomes one behind a string
/// of the same file that says the shape.
fn written_in_tests(root: &Path) -> Vec<Case> {
    let folders = ["tests", "tools", "cli/tests", "codegen", "runtime"];
    let paths = folders.iter().flat_map(|f| files(&root.join(f), "rs"));
    paths.flat_map(|path| written_in(root, &path)).collect()
}

fn written_in(root: &Path, path: &Path) -> Vec<Case> {
    let literals = literals(&fs::read_to_string(path).unwrap_or_default());
    let head = literals.iter().map(|literal| literal.text.trim());
    let head = head
        .filter(|text| text.starts_with("shape = "))
        .find(|text| !text.contains('\n') && LayerSpec::from_toml(text).is_ok());
    let read = |text: &str| {
        let alone = LayerSpec::from_toml(text).ok();
        alone.or_else(|| LayerSpec::from_toml(&format!("{}\n{text}", head?)).ok())
    };
    let specs = literals.iter().filter(|l| l.text.contains(" = "));
    let cases = specs.filter_map(|literal| {
        Some(Case {
            name: format!("{}:{}", relative(root, path), literal.line),
            spec: read(&literal.text)?,
        })
    });
    cases.collect()
}

/// The first layer with experts of every model family's test configuration.
fn families() -> Vec<Case> {
    let folder = archive::folder("families");
    let paths = files(&folder, "json");
    let configs = paths.iter().filter(|path| path.ends_with("config.json"));
    let read = |path: &PathBuf| {
        let text = fs::read_to_string(path).ok()?;
        let layer = *hf::moe_layers(&text).ok()?.first()?;
        Some(Case {
            name: format!("tests/oracle/families/{}", relative(&folder, path)),
            spec: hf::import(&text, layer).ok()?.spec,
        })
    };
    configs.filter_map(read).collect()
}

fn relative(root: &Path, path: &Path) -> String {
    let short = path.strip_prefix(root).unwrap_or(path);
    short.display().to_string()
}

/// Every file below `folder` with the extension, in order; build output aside.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut list = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && entry.file_name() != "target" {
            list.extend(files(&path, extension));
        } else if path.extension().is_some_and(|e| e == extension) {
            list.push(path);
        }
    }
    list.sort();
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_layer_is_found() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let cases = cases(&root, 0, 10);
        let count = |part: &str| cases.iter().filter(|c| c.name.contains(part)).count();
        assert_eq!(count("sample-"), 10);
        assert!(count("examples/specs") >= 7);
        assert!(count("conformance") >= 30, "{}", count("conformance"));
        assert!(count("families") >= 30, "{}", count("families"));
    }
}
