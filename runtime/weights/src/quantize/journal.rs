//! The record of an output folder: its finished files, their checksums, and the matrices' errors.

use super::output::write_whole;
use super::{MatrixError, QuantizeError};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The record's name in the folder, where it stays as a report.
pub(super) const NAME: &str = "moesaic_quantize.json";

/// The record of a folder, which is written anew after each file.
pub(super) struct Journal {
    path: PathBuf,
    format: String,
    /// Whether an earlier run in this format left a record.
    pub known: bool,
    pub files: BTreeMap<String, Finished>,
}

/// A finished file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Finished {
    pub checksum: u64,
    /// The identity of the source's file.
    pub source: String,
    pub matrices: Vec<MatrixError>,
}

impl Journal {
    /// Opens the record of a folder. A record of another format, or none, counts as empty.
    pub fn open(folder: &Path, format: &str) -> Journal {
        let path = folder.join(NAME);
        let text = fs::read_to_string(&path).unwrap_or_default();
        let read: Value = serde_json::from_str(&text).unwrap_or_default();
        let same = read["format"] == json!(format);
        let files = read["files"].as_object().filter(|_| same);
        let files = files.into_iter().flatten();
        Journal {
            path,
            format: format.to_string(),
            known: same,
            files: files
                .filter_map(|(name, value)| Some((name.clone(), finished(value)?)))
                .collect(),
        }
    }

    /// Adds a file, and writes the record.
    pub fn add(&mut self, name: &str, file: Finished) -> Result<(), QuantizeError> {
        self.files.insert(name.to_string(), file);
        let file = |(name, file): (&String, &Finished)| {
            let errors = file.matrices.iter();
            let errors = errors.map(|m| (m.name.clone(), json!(m.relative_rms)));
            let value = json!({
                "checksum": format!("{:016x}", file.checksum),
                "source": file.source,
                "relative_rms": errors.collect::<Map<String, Value>>(),
            });
            (name.clone(), value)
        };
        let files: Map<String, Value> = self.files.iter().map(file).collect();
        let json = json!({ "format": self.format, "files": files });
        write_whole(&self.path, format!("{json:#}\n").as_bytes())
    }
}

fn finished(value: &Value) -> Option<Finished> {
    let errors = value.get("relative_rms")?.as_object()?;
    let matrix = |(name, error): (&String, &Value)| {
        Some(MatrixError {
            name: name.clone(),
            format: String::new(),
            relative_rms: error.as_f64()?,
        })
    };
    Some(Finished {
        checksum: u64::from_str_radix(value.get("checksum")?.as_str()?, 16).ok()?,
        source: value.get("source")?.as_str()?.to_string(),
        matrices: errors.iter().map(matrix).collect::<Option<_>>()?,
    })
}
