//! Opening shared libraries.

use crate::{Attempt, DlError};
use std::ffi::OsStr;
use std::fmt;
use std::path::Path;

/// A loaded shared library; it is unloaded on drop.
pub struct Library {
    inner: libloading::Library,
    name: String,
}

impl Library {
    /// Opens the first of `candidates` that loads. A candidate without a slash is searched as the
    /// system's loader does, and one with a slash is a path. `what`, such as `the CUDA driver`, is
    /// for the error.
    ///
    /// # Errors
    /// [`DlError::NotFound`] lists every candidate with the loader's message.
    pub fn open<S: AsRef<OsStr>>(what: &str, candidates: &[S]) -> Result<Library, DlError> {
        let mut attempts = Vec::new();
        for candidate in candidates {
            match load(candidate.as_ref()) {
                Ok(library) => return Ok(library),
                Err(attempt) => attempts.push(attempt),
            }
        }
        Err(DlError::NotFound {
            what: what.to_string(),
            attempts,
        })
    }

    /// Opens the library at `path`. A bare file name means the file in the current folder, never
    /// the loader's search path.
    ///
    /// # Errors
    /// [`DlError::NotFound`] with the path.
    pub fn open_path(what: &str, path: &Path) -> Result<Library, DlError> {
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        Library::open(what, &[absolute])
    }

    /// Returns the name or path by which it was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Looks up a symbol as a value of type `T`, usually a function pointer.
    ///
    /// # Safety
    /// `T` must be the symbol's type (a pointer-sized one). Do not use the value after the library
    /// is dropped.
    ///
    /// # Errors
    /// [`DlError::MissingSymbol`].
    pub unsafe fn symbol<T: Copy>(&self, symbol: &str) -> Result<T, DlError> {
        // SAFETY: the caller vouches for the type, and keeps the library for
        // as long as the copied value is used.
        match unsafe { self.inner.get::<T>(symbol.as_bytes()) } {
            Ok(found) => Ok(*found),
            Err(error) => Err(DlError::MissingSymbol {
                library: self.name.clone(),
                symbol: symbol.to_string(),
                reason: words(&error),
            }),
        }
    }

    /// Keeps the library loaded for the life of the process. Vendor libraries need that, because
    /// their threads and exit handlers must not lose their code.
    pub fn keep_loaded(self) {
        std::mem::forget(self.inner);
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Library({})", self.name)
    }
}

fn load(candidate: &OsStr) -> Result<Library, Attempt> {
    let name = candidate.to_string_lossy().into_owned();
    // SAFETY: opening runs the library's initializers. Callers only open vendor libraries and
    // kernels compiled here, whose initializers require nothing of the process.
    match unsafe { libloading::Library::new(candidate) } {
        Ok(inner) => Ok(Library { inner, name }),
        Err(error) => Err(Attempt {
            name,
            reason: words(&error),
        }),
    }
}

/// Returns the loader's own message, which libloading wraps in its own.
fn words(error: &libloading::Error) -> String {
    use std::error::Error;
    error
        .source()
        .map_or_else(|| error.to_string(), ToString::to_string)
}
