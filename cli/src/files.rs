//! What a command reads and writes, by option: no output is an input, or another output.

use crate::failure::{Failure, Result};
use crate::spec_source::{LayerArgs, QUANT_CONFIG};
use moesaic::weights::{Checkpoint, WeightsError};
use std::fs;
use std::path::{Path, PathBuf};

/// The files that a command is called with. A command lists them and checks them before it
/// does anything: what a run replaces cannot be had back.
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

/// Which file a path leads to, however it is spelled.
#[derive(Debug, PartialEq, Eq)]
enum Identity {
    /// One that is there, by the numbers that its links share.
    There(u64, u64),
    /// One that is to be made, or where there are no such numbers.
    Name(PathBuf),
    /// A pipe or a device, which loses nothing, or a path that leads nowhere.
    None,
}

impl Files {
    /// No files yet.
    pub fn new() -> Files {
        Files::default()
    }

    /// And those that an option has the command read.
    #[must_use]
    pub fn read<P: AsRef<Path>>(
        mut self,
        option: &str,
        paths: impl IntoIterator<Item = P>,
    ) -> Files {
        self.add(option, paths, false);
        self
    }

    /// And those that an option has it write.
    #[must_use]
    pub fn written<P: AsRef<Path>>(
        mut self,
        option: &str,
        paths: impl IntoIterator<Item = P>,
    ) -> Files {
        self.add(option, paths, true);
        self
    }

    /// And those of a checkpoint, a file or a directory.
    #[must_use]
    pub fn checkpoint(self, option: &str, path: Option<&Path>) -> Files {
        let files = path.map(Checkpoint::files_of);
        self.read(option, files.into_iter().flatten())
    }

    /// And those that a layer comes from.
    #[must_use]
    pub fn layer(self, layer: &LayerArgs) -> Files {
        let spec = layer.spec.iter().filter(|path| path.as_os_str() != "-");
        self.read("--spec", spec)
            .model(layer.hf.as_deref())
            .checkpoint("--gguf", layer.gguf.as_deref())
    }

    /// And those of a Hugging Face model: its configuration, which may be named by itself, and
    /// its weights beside it.
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

    /// Refuses an output that is an input, or another output.
    pub fn check(&self) -> Result {
        for (at, output) in self.named.iter().enumerate().filter(|(_, it)| it.written) {
            let others = self.named.iter().enumerate();
            // Of two outputs once.
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

    /// A name in its folder; a link that leads nowhere is replaced, so it is a name, too.
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

/// The folder that a file is in.
fn folder(path: &Path) -> &Path {
    let parent = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

/// Refuses the name of an output that is a directory, or in none: better now than after the
/// work.
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

/// Makes a directory that results go to.
pub fn make_output_dir(option: &str, path: &Path) -> Result {
    if path.exists() && !path.is_dir() {
        return Err(Failure::input(format!(
            "{option} {} is a file, not a directory",
            path.display()
        )));
    }
    fs::create_dir_all(path).map_err(|error| crate::emit::unwritable(path, &error))
}

/// The failure of tensors that cannot be written: they were there to be written.
pub fn unwritable(error: WeightsError) -> Failure {
    match error {
        WeightsError::Io { path, source } => crate::emit::unwritable(&path, &source),
        other => Failure::work(format!("cannot write the output: {other}")),
    }
}
