//! The file of choices.

use crate::TunerKey;
use moesaic_plan::Strategy;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// A kept choice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredChoice {
    /// The key.
    pub key: TunerKey,
    /// The strategy.
    pub strategy: Strategy,
    /// The measured seconds of a step, if any.
    pub seconds: Option<f64>,
}

/// The version of the file format. Other versions are rejected.
const VERSION: u32 = 2;

#[derive(Serialize, Deserialize)]
struct File {
    version: u32,
    choices: Vec<StoredChoice>,
}

/// An error of reading or writing choices.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChoicesError {
    /// The system reports an error.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// The file does not hold choices.
    #[error("{}: not choices of strategies: {error}\ndelete it, and they are measured again", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// The parse error.
        error: serde_json::Error,
    },
    /// The file is of another version.
    #[error("{}: version {found} of choices, this program has {VERSION}\ndelete it, and they are measured again", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The version in the file.
        found: u32,
    },
}

/// Reads choices; returns none where there is no file.
///
/// # Errors
/// [`ChoicesError`] for a file with other contents.
pub fn read(path: &Path) -> Result<Vec<StoredChoice>, ChoicesError> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(io(path, error)),
    };
    let wrong = |error| ChoicesError::Text {
        path: path.to_path_buf(),
        error,
    };
    // Check the version first: with another version, everything else may have changed too.
    let value: serde_json::Value = serde_json::from_str(&text).map_err(wrong)?;
    let found = value.get("version").and_then(serde_json::Value::as_u64);
    match found {
        Some(found) if found != u64::from(VERSION) => Err(ChoicesError::Version {
            path: path.to_path_buf(),
            found: u32::try_from(found).unwrap_or(u32::MAX),
        }),
        _ => serde_json::from_value::<File>(value)
            .map(|file| file.choices)
            .map_err(wrong),
    }
}

/// Writes choices atomically. One rank does it.
///
/// # Errors
/// [`ChoicesError::Io`]; the previous file is then unchanged.
pub fn write(path: &Path, choices: Vec<StoredChoice>) -> Result<(), ChoicesError> {
    let file = File {
        version: VERSION,
        choices,
    };
    let wrong = |error| ChoicesError::Text {
        path: path.to_path_buf(),
        error,
    };
    let text = serde_json::to_string_pretty(&file).map_err(wrong)?;
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}", std::process::id()));
    let temporary = path.with_file_name(name);
    let done = std::fs::write(&temporary, text).and_then(|()| std::fs::rename(&temporary, path));
    done.map_err(|error| {
        let _ = std::fs::remove_file(&temporary);
        io(path, error)
    })
}

fn io(path: &Path, error: std::io::Error) -> ChoicesError {
    ChoicesError::Io {
        path: path.to_path_buf(),
        error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CallKind, RowBucket};

    #[test]
    fn choices_read_back_and_other_files_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("choices.json");
        assert_eq!(read(&path).expect("no file is no choice"), []);
        let record = StoredChoice {
            key: TunerKey {
                machine: "h100".to_string(),
                layer: "mixtral, ep 8".to_string(),
                calls: CallKind::Training,
                rows: RowBucket::Tokens(12),
            },
            strategy: "r=2,overlap_degree=4/2".parse().expect("a strategy"),
            seconds: Some(0.25),
        };
        write(&path, vec![record.clone()]).expect("written");
        assert_eq!(read(&path).expect("read"), [record]);
        assert_eq!(
            std::fs::read_dir(folder.path()).expect("a folder").count(),
            1
        );
        for (text, says) in [
            ("", "not choices"),
            ("{\"version\": 2}", "not choices"),
            ("{\"version\": 1, \"choices\": 3}", "version 1"),
            ("[]", "not choices"),
        ] {
            std::fs::write(&path, text).expect("written");
            let error = read(&path).expect_err(text).to_string();
            assert!(
                error.contains(says) && error.contains("delete it"),
                "{error}"
            );
        }
        let nowhere = folder.path().join("no/choices.json");
        assert!(matches!(
            write(&nowhere, Vec::new()),
            Err(ChoicesError::Io { .. })
        ));
    }
}
