//! docs/FAMILIES.md against the code and the fixtures.

use super::{archive, entries};
use moesaic::spec::hf;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// A row of the table.
struct Row {
    folder: String,
    names: Vec<String>,
    read: bool,
    /// Fixtures of a family that is read, else what its block does.
    last: String,
}

fn text(path: &str) -> String {
    let path = Path::new(crate::ROOT).join(path);
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// What stands between backticks.
fn quoted(cell: &str) -> Vec<String> {
    let parts = cell.split('`').skip(1).step_by(2);
    parts.map(str::to_string).collect()
}

/// The first table of the page.
fn rows(page: &str) -> Vec<Row> {
    let lines = page.lines().skip_while(|line| !line.starts_with("|---"));
    let lines = lines.skip(1).take_while(|line| line.starts_with('|'));
    let row = |line: &str| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [folder, names, read, last] = cells[..] else {
            panic!("four cells: {line}");
        };
        Row {
            folder: folder.to_string(),
            names: quoted(names),
            read: read == "yes",
            last: last.to_string(),
        }
    };
    lines.map(row).collect()
}

/// The `model_type`s of a fixture, outside and inside.
fn model_types(fixture: &Path) -> Vec<String> {
    let config = fs::read_to_string(fixture.join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let types = [&config, &config["text_config"]].map(|c| c["model_type"].as_str());
    types.into_iter().flatten().map(str::to_string).collect()
}

#[test]
fn the_table_is_what_the_code_reads_and_refuses() {
    let rows = rows(&text("docs/FAMILIES.md"));
    let named = |read: bool| -> Vec<&str> {
        let rows = rows.iter().filter(|row| row.read == read);
        let mut names: Vec<&str> = rows.flat_map(|r| &r.names).map(String::as_str).collect();
        names.sort_unstable();
        names
    };
    assert_eq!(named(true), hf::supported_models());
    let refused: BTreeMap<&str, &str> = hf::refused_models().into_iter().collect();
    assert_eq!(named(false), refused.keys().copied().collect::<Vec<_>>());
    for row in rows.iter().filter(|row| !row.read) {
        let said = row.names.iter().map(|name| refused[name.as_str()]);
        assert!(said.into_iter().all(|s| s == row.last), "{}", row.folder);
    }
}

#[test]
fn every_family_that_is_read_has_a_fixture() {
    let mut left: BTreeSet<String> = BTreeSet::new();
    for folder in ["hf", "hf_more", "families", "families_limits"] {
        let names = entries(folder).into_iter();
        let names = names.map(|dir| dir.file_name().unwrap().to_string_lossy().to_string());
        left.extend(names.map(|name| format!("{folder}/{name}")));
    }
    for row in rows(&text("docs/FAMILIES.md")).iter().filter(|r| r.read) {
        let fixtures = quoted(&row.last);
        assert!(!fixtures.is_empty(), "{} has no fixture", row.folder);
        for fixture in fixtures {
            let (folder, name) = fixture.split_once('/').expect("FOLDER/NAME");
            let types = model_types(&archive::folder(folder).join(name));
            let known = types.iter().any(|name| row.names.contains(name));
            assert!(known, "{fixture} is of {types:?}, not of {:?}", row.names);
            assert!(left.remove(&fixture), "{fixture} is named twice");
        }
    }
    assert!(left.is_empty(), "no family names {left:?}");
}

/// The page's table of keys is that of the code, and no fixture has a key that it lacks.
#[test]
fn every_key_about_routing_has_a_rule() {
    let page = text("docs/FAMILIES.md");
    let rows = hf::routing_keys().into_iter().map(|keys| {
        let names: Vec<String> = keys.names.iter().map(|name| format!("`{name}`")).collect();
        let done = match keys.ignored {
            Some(why) => format!("ignored: {why}"),
            None => "must agree".to_string(),
        };
        format!("| {} | {} | {done} |\n", names.join(", "), keys.about)
    });
    let table: String = rows.collect();
    let end = "|---|---|---|\n";
    let said = page.rsplit(end).next().unwrap();
    assert_eq!(said, table, "the last table of docs/FAMILIES.md");
    for folder in ["hf", "hf_more", "families", "families_limits", "quantized"] {
        for dir in entries(folder) {
            let Ok(config) = fs::read_to_string(dir.join("config.json")) else {
                continue;
            };
            let layer = hf::moe_layers(&config).unwrap()[0];
            let notes = hf::import(&config, layer).unwrap().notes;
            let unknown = notes.iter().find(|note| note.contains("no rule is known"));
            assert_eq!(unknown, None, "{}", dir.display());
        }
    }
}

/// Numbers in words are counted here.
#[test]
fn the_documents_count_as_the_code_does() {
    let page = text("docs/FAMILIES.md");
    let rows = rows(&page);
    let (all, read) = (rows.len(), rows.iter().filter(|row| row.read).count());
    let folders: BTreeSet<&str> = rows.iter().map(|row| row.folder.as_str()).collect();
    assert_eq!(folders.len(), all, "a folder is named twice");
    for said in [
        format!("has {all} folders with MoE code"),
        format!("reads {read} of {all}"),
    ] {
        assert!(
            page.contains(&said),
            "docs/FAMILIES.md does not say: {said}"
        );
    }
    let said = format!("config.json of {read} model families");
    let page = text("docs/ARCHITECTURE.md");
    assert!(page.contains(&said), "ARCHITECTURE does not say: {said}");
}
