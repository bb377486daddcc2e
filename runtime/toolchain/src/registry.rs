//! The list of installed compilers: `toolchain/registry.json`.

use crate::{ToolKind, ToolchainError};
use moesaic_rocm::ClangFacts;
use serde::{Deserialize, Serialize};
use std::fs::{File, Metadata};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// The version of the file's format. Other versions are read as empty.
const FORMAT: u32 = 1;

/// An installed compiler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registered {
    /// The kind it serves.
    pub kind: ToolKind,
    /// The wheel it came in.
    pub package: String,
    /// The wheel's version.
    pub version: String,
    /// The name it reports, such as `NVRTC 13.0`.
    pub name: String,
    /// The main file, relative to the toolchain folder, so that you can move or mount the cache
    /// elsewhere.
    pub file: PathBuf,
    /// The size of the main file in bytes.
    pub bytes: u64,
    /// The modification time of the main file, in seconds of Unix time.
    pub modified: u64,
    /// The facts it reported when it was installed, if it is a clang for AMD.
    #[serde(default)]
    pub clang: Option<ClangFacts>,
}

/// The registry of one toolchain folder.
#[derive(Clone, Debug)]
pub struct Registry {
    folder: PathBuf,
    tools: Vec<Registered>,
}

#[derive(Serialize, Deserialize)]
struct OnDisk<Tool> {
    format: u32,
    tools: Vec<Tool>,
}

impl Registry {
    /// Opens the registry of the user's cache directory.
    ///
    /// # Errors
    /// If there is no cache directory.
    pub fn open() -> Result<Registry, ToolchainError> {
        Ok(Registry::at(&moesaic_cache::home()?))
    }

    /// Opens the registry of the cache directory `home`. A file that is missing, damaged or of
    /// another format counts as empty; installing again registers the tools that are there.
    pub fn at(home: &Path) -> Registry {
        let folder = home.join("toolchain");
        let tools = read(&folder.join("registry.json")).unwrap_or_default();
        Registry { folder, tools }
    }

    /// Returns the folder that holds the installed compilers.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the registered tools that still exist.
    pub fn list(&self) -> Vec<&Registered> {
        self.tools
            .iter()
            .filter(|tool| self.is_there(tool))
            .collect()
    }

    /// Returns the tool of this kind, if it is registered and still exists.
    pub fn get(&self, kind: ToolKind) -> Option<&Registered> {
        self.tools
            .iter()
            .find(|tool| tool.kind == kind && self.is_there(tool))
    }

    /// Returns the absolute path of a registered tool's main file.
    pub fn path(&self, tool: &Registered) -> PathBuf {
        self.folder.join(&tool.file)
    }

    /// Adds or replaces the tool of its kind, also in the file.
    pub(crate) fn register(&mut self, tool: Registered) -> Result<(), ToolchainError> {
        self.tools.retain(|other| other.kind != tool.kind);
        self.tools.push(tool);
        self.tools.sort_by_key(|tool| tool.kind);
        self.write()
    }

    /// Reads the file again, because another process may have written it.
    pub(crate) fn refresh(&mut self) {
        self.tools = read(&self.folder.join("registry.json")).unwrap_or_default();
    }

    /// Returns true if the file still exists. One that was touched or copied counts; one that was
    /// truncated or replaced does not.
    fn is_there(&self, tool: &Registered) -> bool {
        let metadata = std::fs::metadata(self.path(tool));
        metadata.is_ok_and(|metadata| metadata.is_file() && metadata.len() == tool.bytes)
    }

    fn write(&self) -> Result<(), ToolchainError> {
        let path = self.folder.join("registry.json");
        let failed = ToolchainError::io("write", &path);
        let content = OnDisk {
            format: FORMAT,
            tools: self.tools.clone(),
        };
        let text = serde_json::to_string_pretty(&content).map_err(|error| failed(error.into()))?;
        let mut file = tempfile::NamedTempFile::new_in(&self.folder).map_err(&failed)?;
        file.write_all(text.as_bytes()).map_err(&failed)?;
        file.persist(&path).map_err(|error| failed(error.error))?;
        Ok(())
    }
}

/// Reads the file, ignoring fields that a later version has added.
fn read(path: &Path) -> Option<Vec<Registered>> {
    let on_disk: OnDisk<serde_json::Value> =
        serde_json::from_reader(File::open(path).ok()?).ok()?;
    let known = |tool| serde_json::from_value(tool).ok();
    (on_disk.format == FORMAT).then(|| on_disk.tools.into_iter().filter_map(known).collect())
}

/// Returns seconds of Unix time, or zero if the system does not tell.
pub(crate) fn modified(metadata: &Metadata) -> u64 {
    let time = metadata.modified().ok();
    let since = time.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_of_a_later_version_are_passed_over() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("toolchain");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("mpiexec"), "x").unwrap();
        let tool = |kind: &str| {
            format!(
                "{{\"kind\": \"{kind}\", \"package\": \"p\", \"version\": \"1\", \"name\": \"n\", \
                 \"file\": \"mpiexec\", \"bytes\": 1, \"modified\": 0}}"
            )
        };
        let text = format!(
            "{{\"format\": 1, \"tools\": [{}, {}]}}",
            tool("later"),
            tool("mpi")
        );
        std::fs::write(folder.join("registry.json"), text).unwrap();
        let registry = Registry::at(home.path());
        assert_eq!(registry.list().len(), 1);
        assert!(registry.get(ToolKind::Mpi).is_some());
    }
}
