//! Files that are either whole or absent.

use crate::StoreError;
use crate::layout::{Layout, TEMPORARY};
use std::fs;
use std::io::{Read, Seek, Write};
use std::path::Path;
use tempfile::NamedTempFile;

/// The care taken between writing a file and naming it.
pub(crate) enum Care<'a> {
    /// None: losing the file in a power cut does no harm.
    Quick,
    /// Read the file back, check it, and wait until the disk has it.
    Thorough(&'a dyn Fn(Vec<u8>) -> Result<(), String>),
}

/// Writes `bytes` to `path` through a temporary file in the same directory, so a reader sees the
/// old file, the new one or none.
pub(crate) fn write(
    layout: &Layout,
    path: &Path,
    bytes: &[u8],
    care: Care<'_>,
) -> Result<(), StoreError> {
    let dir = path.parent().unwrap_or(Path::new("."));
    make_dir(layout, dir).map_err(|error| StoreError::io("make", dir, error))?;
    let io = |error| StoreError::io("write", path, error);
    let mut file = temporary(layout, dir).map_err(io)?;
    file.write_all(bytes).map_err(io)?;
    if let Care::Thorough(check) = care {
        let back = read_back(&mut file).map_err(io)?;
        let unfaithful = |reason| StoreError::Unfaithful {
            path: path.to_path_buf(),
            reason,
        };
        check(back).map_err(unfaithful)?;
        file.as_file().sync_all().map_err(io)?;
    }
    file.persist(path).map_err(|error| io(error.error))?;
    // The rename reaches the disk only when its directory is synced. Not every file system can sync
    // one, and a lost entry is only a miss.
    if let (Care::Thorough(_), Ok(dir)) = (care, fs::File::open(dir)) {
        let _ = dir.sync_all();
    }
    Ok(())
}

/// Makes `dir` and checks that a file can be written to it.
pub(crate) fn try_write(layout: &Layout, dir: &Path) -> Result<(), StoreError> {
    make_dir(layout, dir).map_err(|error| StoreError::io("make", dir, error))?;
    let io = |error| StoreError::io("write to", dir, error);
    let mut file = temporary(layout, dir).map_err(io)?;
    file.write_all(b"\n").map_err(io)
}

fn read_back(file: &mut NamedTempFile) -> std::io::Result<Vec<u8>> {
    let mut back = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut back)?;
    Ok(back)
}

/// Makes a directory that only this user can write to, because its files are executed. Users who
/// may read the cache directory may read this one too.
pub(crate) fn make_dir(layout: &Layout, dir: &Path) -> std::io::Result<()> {
    private_dirs(layout.cache(), 0)?;
    private_dirs(dir, readers(layout))
}

#[cfg(unix)]
fn private_dirs(dir: &Path, others: u32) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700 | others).create(dir)
}

#[cfg(unix)]
fn temporary(layout: &Layout, dir: &Path) -> std::io::Result<NamedTempFile> {
    use std::os::unix::fs::PermissionsExt;
    let mode = 0o600 | readers(layout) & 0o044;
    tempfile::Builder::new()
        .prefix(TEMPORARY)
        .permissions(fs::Permissions::from_mode(mode))
        .tempfile_in(dir)
}

/// Returns the permissions of other users in the cache directory, except for writing. Where
/// everybody can write, as in /tmp, others get none.
#[cfg(unix)]
fn readers(layout: &Layout) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    let mode = layout
        .cache()
        .metadata()
        .map_or(0, |m| m.permissions().mode());
    if mode & 0o002 == 0 { mode & 0o055 } else { 0 }
}

#[cfg(not(unix))]
fn private_dirs(dir: &Path, _: u32) -> std::io::Result<()> {
    fs::create_dir_all(dir)
}

#[cfg(not(unix))]
fn temporary(_: &Layout, dir: &Path) -> std::io::Result<NamedTempFile> {
    tempfile::Builder::new().prefix(TEMPORARY).tempfile_in(dir)
}

#[cfg(not(unix))]
fn readers(_: &Layout) -> u32 {
    0
}
