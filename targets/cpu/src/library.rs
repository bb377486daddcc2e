//! Loads a shared object from bytes.

use moesaic_dl::{DlError, Library};
use moesaic_target::Scratch;
use std::io::{self, Write};
use std::path::PathBuf;

/// A loaded shared object and its file, which must outlive it.
pub struct LoadedLibrary {
    /// The library.
    pub library: Library,
    /// Declared after the library, to be dropped after it: the loader knows a
    /// library by its path, and would hand out this one again if the number
    /// of a closed file came back under it.
    _file: Backing,
}

enum Backing {
    #[cfg(target_os = "linux")]
    Memory(#[expect(dead_code, reason = "held open, never read")] std::fs::File),
    Disk(#[expect(dead_code, reason = "removed on drop")] Scratch),
}

/// A shared object that cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// Neither memory nor the disk takes its bytes.
    #[error("no place for it: {0}")]
    NoPlace(#[source] io::Error),
    /// The loader refuses it.
    #[error(transparent)]
    Refused(#[from] DlError),
}

/// Loads `binary` from memory if the system can, else from a temporary file,
/// because some systems forbid running code from memory files. Every call loads
/// the object anew, with data of its own.
///
/// # Errors
/// [`LoadError`] has the message of the loader.
pub fn load(binary: &[u8]) -> Result<LoadedLibrary, LoadError> {
    let from_memory = in_memory(binary).ok().and_then(|place| open(place).ok());
    match from_memory {
        Some(loaded) => Ok(loaded),
        None => open(on_disk(binary).map_err(LoadError::NoPlace)?),
    }
}

fn open((path, backing): (PathBuf, Backing)) -> Result<LoadedLibrary, LoadError> {
    let library = Library::open_path("a compiled kernel", &path)?;
    Ok(LoadedLibrary {
        library,
        _file: backing,
    })
}

#[cfg(target_os = "linux")]
fn in_memory(binary: &[u8]) -> io::Result<(PathBuf, Backing)> {
    use std::os::fd::{AsRawFd, FromRawFd};
    // SAFETY: the name is a terminated string; the call has no other demands.
    let fd = unsafe { libc::memfd_create(c"moesaic-kernel".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and belongs to nobody else.
    let mut file = unsafe { std::fs::File::from_raw_fd(fd) };
    file.write_all(binary)?;
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    Ok((path, Backing::Memory(file)))
}

#[cfg(not(target_os = "linux"))]
fn in_memory(_: &[u8]) -> io::Result<(PathBuf, Backing)> {
    Err(io::ErrorKind::Unsupported.into())
}

fn on_disk(binary: &[u8]) -> io::Result<(PathBuf, Backing)> {
    let folder = Scratch::new()?;
    let path = folder.path().join("kernel.so");
    // Closed before it is loaded: a file that is open for writing cannot run.
    std::fs::write(&path, binary)?;
    Ok((path, Backing::Disk(folder)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn garbage_is_refused_with_the_loaders_words() {
        let error = load(b"not a shared object").err().unwrap().to_string();
        assert!(
            error.contains("too short") || error.contains("invalid ELF"),
            "{error}"
        );
    }
}
