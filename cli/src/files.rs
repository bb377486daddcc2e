//! The files that a command reads and writes, by option. No output may be an input or another
//! output.

use crate::failure::{Failure, Result};
use crate::spec_source::{LayerArgs, QUANT_CONFIG};
use moesaic::weights::{Checkpoint, WeightsError};
use std::fs;
use std::path::{Path, PathBuf};

/// The files that a command names. A command lists them and checks them before it does anything
/// else, because a replaced file cannot be restored.
#[derive(Default)]
pub struct Files {
    named: Vec<Named>,
}

struct Named {
    option: String,
    path: PathBuf,
    file: Identity,
    written: bool,
}

/// The identity of the file that a path leads to, however the path is spelled.
#[derive(Debug, PartialEq, Eq)]
enum Identity {
    /// An existing file, by its device and inode numbers, which its hard links share.
    There(u64, u64),
    /// A file that does not exist yet, or any file on a system without such numbers.
    Name(PathBuf),
    /// A pipe or a device, which loses nothing when written to, or a path in a folder that does not
    /// exist.
    None,
}

impl Files {
    /// Returns an empty list.
    pub fn new() -> Files {
        Files::default()
    }

    /// Adds the files that an option makes the command read.
    #[must_use]
    pub fn read<P: AsRef<Path>>(
        mut self,
        option: &str,
        paths: impl IntoIterator<Item = P>,
    ) -> Files {
        self.add(option, paths, false);
        self
    }

    /// Adds the files that an option makes the command write.
    #[must_use]
    pub fn written<P: AsRef<Path>>(
        mut self,
        option: &str,
        paths: impl IntoIterator<Item = P>,
    ) -> Files {
        self.add(option, paths, true);
        self
    }

    /// Adds the files of a checkpoint, which is a file or a directory.
    #[must_use]
    pub fn checkpoint(self, option: &str, path: Option<&Path>) -> Files {
        let files = path.map(Checkpoint::files_of);
        self.read(option, files.into_iter().flatten())
    }

    /// Adds the files that a layer comes from.
    #[must_use]
    pub fn layer(self, layer: &LayerArgs) -> Files {
        let spec = layer
            .file()
            .into_iter()
            .filter(|path| path.as_os_str() != "-");
        self.read("--spec", spec)
            .model(layer.model.hf.as_deref())
            .checkpoint("--gguf", layer.model.gguf.as_deref())
    }

    /// Adds the files of a Hugging Face model: its configuration, which `--hf` may name directly,
    /// and the weights next to it.
    #[must_use]
    pub fn model(self, hf: Option<&Path>) -> Files {
        let Some(path) = hf else {
            return self;
        };
        let (directory, config) = if path.is_file() {
            (folder(path), path.to_path_buf())
        } else {
            (path, path.join("config.json"))
        };
        self.read("--hf", [config, directory.join(QUANT_CONFIG)])
            .checkpoint("--hf", Some(directory))
    }

    fn add<P: AsRef<Path>>(
        &mut self,
        option: &str,
        paths: impl IntoIterator<Item = P>,
        written: bool,
    ) {
        self.named.extend(paths.into_iter().map(|path| Named {
            option: option.to_string(),
            file: Identity::of(path.as_ref()),
            path: path.as_ref().to_path_buf(),
            written,
        }));
    }

    /// Refuses an output that is an input or another output.
    pub fn check(&self) -> Result {
        for (at, output) in self.named.iter().enumerate().filter(|(_, it)| it.written) {
            let others = self.named.iter().enumerate();
            // Compares each pair of outputs once.
            let mut others = others.filter(|(other, it)| !it.written || *other > at);
            let same = others.find(|(_, it)| it.file != Identity::None && it.file == output.file);
            if let Some((_, other)) = same {
                return Err(output.clash(other));
            }
        }
        Ok(())
    }
}

impl Named {
    fn clash(&self, other: &Named) -> Failure {
        let (option, path) = (&self.option, self.path.display());
        let (other_path, there) = (&other.path, other.path.display());
        let does = if other.written { "writes" } else { "reads" };
        let other = format!("which {} {does}", other.option);
        let message = if self.path.as_os_str() == other_path.as_os_str() {
            format!("{option} would overwrite {path}, {other}")
        } else {
            format!("{option} {path} would overwrite {there}, {other}: they are one file")
        };
        Failure::input(message).hint("name another file for one of them")
    }
}

impl Identity {
    fn of(path: &Path) -> Identity {
        match fs::metadata(path) {
            Ok(meta) if meta.is_file() => numbers(&meta).unwrap_or_else(|| Identity::name(path)),
            Ok(_) => Identity::None,
            Err(_) => Identity::name(path),
        }
    }

    /// Returns a path's name in its resolved folder. A link that leads nowhere is replaced when the
    /// file is written, so the link's own name counts.
    fn name(path: &Path) -> Identity {
        let name = path.file_name();
        let folder = fs::canonicalize(folder(path)).ok();
        match folder.zip(name) {
            Some((folder, name)) => Identity::Name(folder.join(name)),
            None => Identity::None,
        }
    }
}

#[cfg(unix)]
fn numbers(meta: &fs::Metadata) -> Option<Identity> {
    use std::os::unix::fs::MetadataExt;
    Some(Identity::There(meta.dev(), meta.ino()))
}

#[cfg(not(unix))]
fn numbers(_: &fs::Metadata) -> Option<Identity> {
    None
}

/// Returns the folder that a file is in.
fn folder(path: &Path) -> &Path {
    let parent = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

/// Refuses an output name that is a directory, or whose folder does not exist. The check comes
/// before the work, which would be lost otherwise.
pub fn check_output(option: &str, path: &Path) -> Result {
    let (shown, dir) = (path.display(), folder(path));
    match (path.is_dir(), dir.is_dir()) {
        (true, _) => Err(Failure::input(format!(
            "{option} {shown} is a directory, not a file"
        ))),
        (_, false) => Err(Failure::input(format!(
            "{option} {shown}: there is no directory {}",
            dir.display()
        ))),
        _ => Ok(()),
    }
}

/// Makes a directory for results.
pub fn make_output_dir(option: &str, path: &Path) -> Result {
    if path.exists() && !path.is_dir() {
        return Err(Failure::input(format!(
            "{option} {} is a file, not a directory",
            path.display()
        )));
    }
    fs::create_dir_all(path).map_err(|error| Failure::unwritable(path, &error))
}

/// Returns the failure for tensors that cannot be written.
pub fn unwritable(error: WeightsError) -> Failure {
    match error {
        WeightsError::Io { path, source } => Failure::unwritable(&path, &source),
        other => Failure::work(format!("cannot write the output: {other}")),
    }
}
