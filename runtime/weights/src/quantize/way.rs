//! Checks an output folder before a run, and writes the files there that hold no tensors. No file is
//! overwritten that this model in this format would not have.

use super::QuantizeError;
use super::journal::{self, Journal};
use super::output::write_whole;
use crate::WeightsError;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Files with weights in other forms, which the output does not take over.
const WEIGHTS: [&str; 9] = [
    "safetensors",
    "bin",
    "pt",
    "pth",
    "gguf",
    "h5",
    "msgpack",
    "onnx",
    "tmp",
];

/// The folders of a model that transformers reads beside the files at its top.
const FOLDERS: [&str; 1] = ["additional_chat_templates"];

/// The end of the name of an index, which would list weights that the output does not have.
const INDEX_END: &str = ".index.json";

/// A file without tensors.
pub(super) struct Beside {
    name: PathBuf,
    content: Content,
}

enum Content {
    Text(String),
    CopyOf(PathBuf),
}

impl Beside {
    pub fn text(name: &str, text: String) -> Beside {
        Beside {
            name: PathBuf::from(name),
            content: Content::Text(text),
        }
    }

    fn bytes(&self) -> Result<Vec<u8>, QuantizeError> {
        match &self.content {
            Content::Text(text) => Ok(text.clone().into_bytes()),
            Content::CopyOf(path) => Ok(fs::read(path).map_err(WeightsError::io(path))?),
        }
    }

    /// Returns true if the folder has it already. A file with other content is in the way.
    fn is_there(&self, folder: &Path, wanted: &[u8]) -> Result<bool, QuantizeError> {
        let path = folder.join(&self.name);
        match fs::read(&path) {
            Ok(found) if found == wanted => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            _ => Err(QuantizeError::InTheWay { path }),
        }
    }

    /// Writes it, unless it is there.
    pub fn write(&self, folder: &Path) -> Result<(), QuantizeError> {
        let bytes = self.bytes()?;
        if self.is_there(folder, &bytes)? {
            return Ok(());
        }
        let path = folder.join(&self.name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(QuantizeError::write(parent))?;
        }
        write_whole(&path, &bytes)
    }
}

/// Returns the source's files that are no weights: tokenizer, templates, licence.
pub(super) fn others(folder: &Path) -> Result<Vec<Beside>, QuantizeError> {
    let mut others = Vec::new();
    add(&mut others, folder, Path::new(""))?;
    for name in FOLDERS {
        if folder.join(name).is_dir() {
            add(&mut others, folder, Path::new(name))?;
        }
    }
    Ok(others)
}

/// Adds the files of a folder below the model's that are no weights.
fn add(others: &mut Vec<Beside>, model: &Path, below: &Path) -> Result<(), QuantizeError> {
    let folder = model.join(below);
    let entries = fs::read_dir(&folder).map_err(WeightsError::io(&folder))?;
    for entry in entries.flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let end = path.extension();
        let weights = end.is_some_and(|end| WEIGHTS.iter().any(|known| end == *known));
        let weights = weights || name.to_string_lossy().ends_with(INDEX_END);
        let mut own = ["config.json", journal::NAME].iter();
        if weights || is_hidden(&path) || own.any(|own| name == *own) || !path.is_file() {
            continue;
        }
        others.push(Beside {
            name: below.join(name),
            content: Content::CopyOf(path),
        });
    }
    Ok(())
}

fn is_hidden(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().starts_with('.')
}

/// Checks before anything is written that the run will not meet a file of others. `is_source` says
/// of a finished file whether it was made from the source as it is now.
pub(super) fn check(
    to: &Path,
    journal: &Journal,
    beside: &[Beside],
    is_source: impl Fn(&str) -> bool,
) -> Result<(), QuantizeError> {
    let entries = fs::read_dir(to).map_err(QuantizeError::write(to))?;
    let mut present = entries.flatten().map(|entry| entry.path());
    // Nothing that a run writes under its final name is hidden.
    let other = present.find(|path| !is_hidden(path));
    if let (Some(path), false) = (other, journal.known) {
        return Err(QuantizeError::InTheWay { path });
    }
    for name in journal.files.keys() {
        let path = to.join(name);
        if path.exists() && !is_source(name) {
            return Err(QuantizeError::InTheWay { path });
        }
    }
    for file in beside {
        file.is_there(to, &file.bytes()?)?;
    }
    Ok(())
}
