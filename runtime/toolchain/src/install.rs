//! Installing compilers from vendor wheels.

use crate::check::{Working, check};
use crate::package::Package;
use crate::pip::Python;
use crate::registry::{Registered, Registry, modified};
use crate::{Kind, ToolchainError};
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};

/// What an installation is doing, for a progress display.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// Nothing to do.
    AlreadyThere(Registered),
    /// Pip fetches this wheel.
    Downloading(String),
    /// The needed files of the wheel are unpacked.
    Unpacking(String),
    /// A trivial kernel is compiled.
    Checking(Kind),
    /// The compiler can be used.
    Installed(Registered),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::AlreadyThere(tool) => write!(f, "{}: {} is installed", tool.kind, tool.name),
            Step::Downloading(what) => write!(f, "downloading {what}"),
            Step::Unpacking(what) => write!(f, "unpacking {what}"),
            Step::Checking(kind) => write!(f, "{kind}: compiling a test kernel"),
            Step::Installed(tool) => write!(f, "{}: {} installed", tool.kind, tool.name),
        }
    }
}

/// Installs the compilers of these kinds that `registry` lacks. It may be
/// called from several processes at once: one installs, the others wait.
///
/// # Errors
/// [`ToolchainError`]; what was installed before it stays installed.
pub fn install(
    registry: &mut Registry,
    kinds: &[Kind],
    progress: &mut dyn FnMut(&Step),
) -> Result<(), ToolchainError> {
    let missing = |registry: &Registry| kinds.iter().any(|kind| registry.get(*kind).is_none());
    let lock = missing(registry)
        .then(|| lock(registry.folder()))
        .transpose()?;
    if lock.is_some() {
        registry.refresh();
    }
    for kind in kinds {
        match registry.get(*kind) {
            Some(tool) => progress(&Step::AlreadyThere(tool.clone())),
            None => install_one(registry, *kind, progress)?,
        }
    }
    Ok(())
}

/// Held until the file is dropped, or the process ends in whatever way.
fn lock(folder: &Path) -> Result<File, ToolchainError> {
    std::fs::create_dir_all(folder).map_err(ToolchainError::io("create", folder))?;
    let path = folder.join("lock");
    let file = File::create(&path).map_err(ToolchainError::io("create", &path))?;
    file.lock().map_err(ToolchainError::io("lock", &path))?;
    Ok(file)
}

fn install_one(
    registry: &mut Registry,
    kind: Kind,
    progress: &mut dyn FnMut(&Step),
) -> Result<(), ToolchainError> {
    let folder = registry.folder().join(kind.package().folder());
    let working = match adopt(kind, &folder, progress) {
        Some(working) => working,
        None => fetch(registry, kind, &folder, progress)?,
    };
    let tool = describe(registry, kind, &folder, working)?;
    registry.register(tool.clone())?;
    progress(&Step::Installed(tool));
    Ok(())
}

/// A folder that is there and works only has to be registered: another kind
/// came in the same wheel, or the registry was lost.
fn adopt(kind: Kind, folder: &Path, progress: &mut dyn FnMut(&Step)) -> Option<Working> {
    if !folder.is_dir() {
        return None;
    }
    progress(&Step::Checking(kind));
    check(kind, folder).ok()
}

/// Everything happens in a temporary folder; the last act moves it in place.
fn fetch(
    registry: &Registry,
    kind: Kind,
    folder: &Path,
    progress: &mut dyn FnMut(&Step),
) -> Result<Working, ToolchainError> {
    let package = kind.package();
    let create = ToolchainError::io("create a folder in", registry.folder());
    let temporary = tempfile::Builder::new()
        .prefix("installing-")
        .tempdir_in(registry.folder())
        .map_err(&create)?;
    let tree = temporary.path().join("tree");
    std::fs::create_dir(&tree).map_err(&create)?;
    let python = Python::of_machine();
    progress(&Step::Downloading(package.requirement()));
    let wheel = python.download(kind, temporary.path())?;
    progress(&Step::Unpacking(package.requirement()));
    python.unpack(kind, &wheel, &tree)?;
    finish_tree(&package, &tree)?;
    progress(&Step::Checking(kind));
    let working = check(kind, &tree).map_err(|reason| ToolchainError::Check {
        package: package.requirement(),
        reason,
    })?;
    replace(folder, &tree, temporary.path())?;
    Ok(working)
}

/// Wheels do not keep the right to execute; and clang calls its linker by the
/// name `lld`, which zig does not answer to.
fn finish_tree(package: &Package, tree: &Path) -> Result<(), ToolchainError> {
    if !package.executable {
        return Ok(());
    }
    make_executable(&tree.join(package.main))?;
    let bin = tree.join("bin");
    std::fs::create_dir(&bin).map_err(ToolchainError::io("create", &bin))?;
    let lld = bin.join("lld");
    std::fs::write(&lld, LLD).map_err(ToolchainError::io("write", &lld))?;
    make_executable(&lld)
}

/// Clang passes `-flavor gnu` first.
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

/// A folder that failed its check makes way; it is deleted with `temporary`.
fn replace(folder: &Path, tree: &Path, temporary: &Path) -> Result<(), ToolchainError> {
    if folder.exists() {
        let old = temporary.join("old");
        std::fs::rename(folder, &old).map_err(ToolchainError::io("replace", folder))?;
    }
    std::fs::rename(tree, folder).map_err(ToolchainError::io("create", folder))
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect()
}

fn describe(
    registry: &Registry,
    kind: Kind,
    folder: &Path,
    working: Working,
) -> Result<Registered, ToolchainError> {
    let package = kind.package();
    let is_main = |file: &PathBuf| {
        file.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with(package.main))
    };
    let main = files(folder)
        .into_iter()
        .find(is_main)
        .ok_or_else(|| ToolchainError::Unpack {
            package: package.requirement(),
            reason: format!("it holds no file `{}`", package.main),
        })?;
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
