//! Layers imported from Hugging Face checkpoints compute the results of transformers.

use crate::{archive, support};
use moesaic_spec::format::BLOCKS;
use moesaic_spec::{gguf, hf};
use moesaic_tensor::{Tensor, Tensors};
use moesaic_weights::{Checkpoint, LoadOptions, load_import, write_safetensors};
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

fn cases(folder: &str) -> Vec<PathBuf> {
    let root = archive::folder(folder);
    let entries = fs::read_dir(&root).unwrap_or_else(|e| panic!("{}: {e}", root.display()));
    let mut dirs: Vec<PathBuf> = entries
        .map(|e| e.unwrap().path())
        .filter(|p| p.is_dir())
        .collect();
    dirs.sort();
    dirs
}

fn check_all(folder: &str, least: usize) {
    let dirs = cases(folder);
    assert!(
        dirs.len() >= least,
        "{folder} has only {} cases",
        dirs.len()
    );
    for dir in dirs {
        let report = support::check(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        assert_eq!(report.wrong_rows, 0, "{}", dir.display());
        assert!(report.error < 2e-6, "{}: {:e}", dir.display(), report.error);
    }
}

#[test]
fn published_families() {
    check_all("hf", 6);
}

#[test]
fn more_families() {
    check_all("hf_more", 30);
}

/// Checkpoints that other libraries quantized, GGUF files among them.
#[test]
fn published_formats() {
    let mut wrong = Vec::new();
    for dir in [cases("formats"), cases("formats_more"), cases("gguf")].concat() {
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        match support::check(&dir) {
            Ok(report) if report.wrong_rows == 0 && report.error < 2e-6 => {}
            Ok(report) => wrong.push(format!(
                "{name}: {:e}, {} rows",
                report.error, report.wrong_rows
            )),
            Err(error) => wrong.push(format!("{name}: {error}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Files that other people's programs wrote have every architecture and every type of blocks.
#[test]
fn every_architecture_and_block_type_has_a_layer() {
    let (mut architectures, mut types) = (BTreeSet::new(), String::new());
    for dir in [cases("formats"), cases("gguf")].concat() {
        let case = fs::read(dir.join("case.json")).unwrap();
        let case: serde_json::Value = serde_json::from_slice(&case).unwrap();
        if let Some(name) = case["architecture"].as_str() {
            architectures.insert(name.to_string());
            types += &format!(" {} {} ", case["format"], case["types"]);
        }
    }
    let wanted = gguf::supported().into_iter().map(String::from);
    assert_eq!(architectures, wanted.collect());
    let names: Vec<&str> = types
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .collect();
    for blocks in BLOCKS {
        assert!(names.contains(&blocks.name), "{}", blocks.name);
    }
}

#[test]
fn every_other_family() {
    check_all("families", 40);
    check_all("families_limits", 8);
}

/// Tensors as transformers holds them in memory, listed by `case.json`, can be stored and read too.
#[test]
fn tensors_of_the_model_in_memory() {
    for dir in [cases("families"), cases("families_limits")].concat() {
        let what = dir.display().to_string();
        let case = fs::read(dir.join("case.json")).unwrap();
        let case: serde_json::Value = serde_json::from_slice(&case).unwrap();
        let layer = case["layer"].as_u64().unwrap() as usize;
        let config = fs::read_to_string(dir.join("config.json")).unwrap();
        let import = hf::import(&config, layer).unwrap();
        let mut ones = Tensors::new();
        for (name, shape) in case["memory"].as_object().unwrap() {
            let shape: Vec<usize> = serde_json::from_value(shape.clone()).unwrap();
            let values = vec![1.0; shape.iter().product()];
            ones.insert(name.clone(), Tensor::copied(&shape, &values));
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.safetensors");
        write_safetensors(&file, &ones).unwrap();
        let checkpoint = Checkpoint::open(&file).unwrap();
        let loaded = load_import(&import, &checkpoint, LoadOptions::default());
        let loaded = loaded.unwrap_or_else(|e| panic!("{what}: {e}"));
        for source in &import.sources {
            let values = loaded[&source.name].to_f64();
            assert!(values.iter().all(|v| *v != 0.0), "{what}: {}", source.name);
        }
    }
}
