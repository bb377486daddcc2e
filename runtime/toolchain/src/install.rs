//! Installs compilers and MPI from wheels.

use crate::check::{Working, check};
use crate::package::Package;
use crate::pip::Python;
use crate::registry::{Registered, Registry, modified};
use crate::{ToolKind, ToolchainError};
use std::fmt;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Prefix of temporary folders.
const TEMPORARY: &str = "installing-";

/// A step of an installation, for a progress display.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InstallStep {
    /// The tool works already.
    AlreadyThere(Registered),
    /// Pip is downloading this wheel.
    Downloading(String),
    /// Pip has these bytes of the wheel.
    Received {
        /// The wheel.
        what: String,
        /// The bytes that have arrived.
        bytes: u64,
    },
    /// The needed files of the wheel are being unpacked.
    Unpacking(String),
    /// A trivial kernel is being compiled, or two processes are being started.
    Checking(ToolKind),
    /// The tool can be used.
    Installed(Registered),
}

impl fmt::Display for InstallStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InstallStep::AlreadyThere(tool) => {
                write!(f, "{}: {} is installed", tool.kind, tool.name)
            }
            InstallStep::Downloading(what) => write!(f, "downloading {what}"),
            InstallStep::Received { what, bytes } => {
                write!(f, "downloading {what}: {:.1} MB", *bytes as f64 / 1e6)
            }
            InstallStep::Unpacking(what) => write!(f, "unpacking {what}"),
            InstallStep::Checking(ToolKind::Mpi) => write!(f, "mpi: starting two processes"),
            InstallStep::Checking(kind) => write!(f, "{kind}: compiling a test kernel"),
            InstallStep::Installed(tool) => write!(f, "{}: {} installed", tool.kind, tool.name),
        }
    }
}

/// Installs the tools of these kinds that `registry` lacks. Several processes may call it at once:
/// one installs, the others wait.
///
/// # Errors
/// [`ToolchainError`]. Tools installed before the failing one stay installed.
pub fn install(
    registry: &mut Registry,
    kinds: &[ToolKind],
    progress: &mut dyn FnMut(&InstallStep),
) -> Result<(), ToolchainError> {
    Installer {
        registry,
        python: Python::of_machine(),
        progress,
    }
    .install(kinds)
}

/// The context of an installation.
struct Installer<'a> {
    registry: &'a mut Registry,
    python: Python,
    progress: &'a mut dyn FnMut(&InstallStep),
}

impl Installer<'_> {
    fn install(&mut self, kinds: &[ToolKind]) -> Result<(), ToolchainError> {
        // With nothing to install, do not even create the lock file: the folder may be read-only.
        let _lock = if kinds.iter().all(|kind| self.registry.get(*kind).is_some()) {
            None
        } else {
            Some(self.begin()?)
        };
        for kind in kinds {
            match self.registry.get(*kind) {
                Some(tool) => (self.progress)(&InstallStep::AlreadyThere(tool.clone())),
                None => self.install_one(*kind)?,
            }
        }
        Ok(())
    }

    /// Takes the lock, reads what others have installed meanwhile, and removes the leftovers of a
    /// killed installation.
    fn begin(&mut self) -> Result<File, ToolchainError> {
        let folder = self.registry.folder();
        let lock = lock(folder)?;
        for path in entries(folder) {
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            if name.starts_with(TEMPORARY) {
                // A leftover that cannot be removed does no harm.
                let _ = std::fs::remove_dir_all(path);
            }
        }
        // Another process may have installed the tools while this one waited for the lock.
        self.registry.refresh();
        Ok(lock)
    }

    fn install_one(&mut self, kind: ToolKind) -> Result<(), ToolchainError> {
        let folder = self.registry.folder().join(kind.package().folder());
        let working = match self.adopt(kind, &folder) {
            Some(working) => working,
            None => self.fetch(kind, &folder)?,
        };
        let tool = describe(self.registry, kind, &folder, working)?;
        self.registry.register(tool.clone())?;
        (self.progress)(&InstallStep::Installed(tool));
        Ok(())
    }

    /// Registers a folder that exists and works: another kind came in the same wheel, or the
    /// registry was lost.
    fn adopt(&mut self, kind: ToolKind, folder: &Path) -> Option<Working> {
        if !folder.is_dir() {
            return None;
        }
        (self.progress)(&InstallStep::Checking(kind));
        check(kind, folder).ok()
    }

    /// Fetches, unpacks and checks a wheel in a temporary folder, and only then moves it into
    /// place.
    fn fetch(&mut self, kind: ToolKind, folder: &Path) -> Result<Working, ToolchainError> {
        let package = kind.package();
        let create = ToolchainError::io("create a folder in", self.registry.folder());
        let temporary = tempfile::Builder::new()
            .prefix(TEMPORARY)
            .tempdir_in(self.registry.folder())
            .map_err(&create)?;
        let tree = temporary.path().join("tree");
        std::fs::create_dir(&tree).map_err(&create)?;
        (self.progress)(&InstallStep::Downloading(package.requirement()));
        let progress = &mut self.progress;
        let wheel = self.python.download(kind, temporary.path(), &mut |bytes| {
            let what = package.requirement();
            progress(&InstallStep::Received { what, bytes });
        })?;
        (self.progress)(&InstallStep::Unpacking(package.requirement()));
        self.python.unpack(kind, &wheel, &tree)?;
        finish_tree(&package, &tree)?;
        (self.progress)(&InstallStep::Checking(kind));
        // Check in the temporary folder, so that a broken tool never gets a name.
        let working = check(kind, &tree).map_err(|reason| ToolchainError::Check {
            package: package.requirement(),
            reason,
        })?;
        replace(folder, &tree, temporary.path())?;
        Ok(working)
    }
}

/// Takes a lock that is held until the file is dropped or the process ends in any way. Some network
/// file systems have no locks. There each move into place is still atomic, and the last one wins.
fn lock(folder: &Path) -> Result<File, ToolchainError> {
    std::fs::create_dir_all(folder).map_err(ToolchainError::io("create", folder))?;
    let path = folder.join("lock");
    let file = File::create(&path).map_err(ToolchainError::io("create", &path))?;
    match file.lock() {
        // Some network file systems have no locks; installing without one is still safe.
        Err(error) if error.kind() != ErrorKind::Unsupported => {
            Err(ToolchainError::io("lock", &path)(error))
        }
        _ => Ok(file),
    }
}

/// Sets the executable bits, which wheels lose, and adds a linker named `lld`: clang calls that
/// name, and zig does not answer to it.
fn finish_tree(package: &Package, tree: &Path) -> Result<(), ToolchainError> {
    main_file(package, tree)?;
    for program in package.programs {
        make_executable(&tree.join(program))?;
    }
    // Only zig's package needs a linker under another name.
    if package.main != "zig" {
        return Ok(());
    }
    let bin = tree.join("bin");
    std::fs::create_dir(&bin).map_err(ToolchainError::io("create", &bin))?;
    let lld = bin.join("lld");
    std::fs::write(&lld, LLD).map_err(ToolchainError::io("write", &lld))?;
    make_executable(&lld)
}

/// The linker script. Clang passes `-flavor gnu` first, which zig does not know.
const LLD: &str = "#!/bin/sh\nshift 2\nexec \"$(dirname \"$0\")/../zig\" ld.lld \"$@\"\n";

#[cfg(unix)]
fn make_executable(path: &Path) -> Result<(), ToolchainError> {
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(path, mode).map_err(ToolchainError::io("set the mode of", path))
}

#[cfg(not(unix))]
fn make_executable(_path: &Path) -> Result<(), ToolchainError> {
    Ok(())
}

/// Moves a new folder into the place of one that failed its check; the old one is deleted with
/// `temporary`.
fn replace(folder: &Path, tree: &Path, temporary: &Path) -> Result<(), ToolchainError> {
    if folder.exists() {
        let old = temporary.join("old");
        std::fs::rename(folder, &old).map_err(ToolchainError::io("replace", folder))?;
    }
    std::fs::rename(tree, folder).map_err(ToolchainError::io("create", folder))
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect()
}

fn main_file(package: &Package, folder: &Path) -> Result<PathBuf, ToolchainError> {
    let is_main = |file: &PathBuf| {
        file.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with(package.main))
    };
    entries(folder)
        .into_iter()
        .find(is_main)
        .ok_or_else(|| ToolchainError::Unpack {
            package: package.requirement(),
            reason: format!("it holds no file `{}`", package.main),
        })
}

fn describe(
    registry: &Registry,
    kind: ToolKind,
    folder: &Path,
    working: Working,
) -> Result<Registered, ToolchainError> {
    let package = kind.package();
    let main = main_file(&package, folder)?;
    let metadata = std::fs::metadata(&main).map_err(ToolchainError::io("read", &main))?;
    let file = main
        .strip_prefix(registry.folder())
        .unwrap_or(&main)
        .to_path_buf();
    Ok(Registered {
        kind,
        package: package.name.to_string(),
        version: package.version.to_string(),
        name: working.name,
        clang: working.clang,
        file,
        bytes: metadata.len(),
        modified: modified(&metadata),
    })
}

#[cfg(test)]
mod tests;
