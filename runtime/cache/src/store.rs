//! The store.

use crate::files::{self, Care};
use crate::flights::Flights;
use crate::format::{self, LARGEST};
use crate::layout::{LANGUAGES, Layout};
use crate::stats::Counters;
use crate::{KernelKey, StoreError, StoreStats, StoredKernel, home};
use moesaic_kernel::KernelSource;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// A content-addressed store of compiled kernels in a directory.
#[derive(Debug)]
pub struct Store {
    pub(crate) layout: Layout,
    pub(crate) counters: Counters,
    pub(crate) flights: Flights,
    pub(crate) strict: bool,
    pub(crate) patience: Duration,
    off: Option<String>,
}

/// The time that a process waits for another that compiles the same kernel, unless
/// [`Store::patience`] sets another. It is a third of the deadline that ranks set each other, so a
/// rank that waits in vain can still compile in time.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Hits refresh a file's time at most this often. That shows which kernels are in use without a
/// write for every read.
const FRESH: Duration = Duration::from_secs(24 * 60 * 60);

impl Store {
    /// Opens the store in `dir`, which need not exist: the first kernel creates it. A directory
    /// that everybody can write to is not used, because a hit is loaded as code; see
    /// [`Store::trouble`].
    pub fn open(dir: impl Into<PathBuf>) -> Store {
        let layout = Layout::new(dir.into());
        // Decide once, when opening: a store that is unusable must not fail differently at each
        // kernel.
        let off = no_dir(&layout).or_else(|| unsafe_dir(&layout));
        let off = off.or_else(|| closed_dir(&layout));
        Store {
            layout,
            counters: Counters::default(),
            flights: Flights::default(),
            strict: false,
            patience: PATIENCE,
            off,
        }
    }

    /// Opens the store of this user; see [`home`]. Without a home directory the store stays empty.
    pub fn open_default() -> Store {
        match home() {
            Ok(dir) => Store::open(dir),
            Err(error) => Store {
                off: Some(error.to_string()),
                ..Store::open(PathBuf::new())
            },
        }
    }

    /// Turns a miss into an error instead of a compile.
    #[must_use]
    pub fn strict(self) -> Store {
        Store {
            strict: true,
            ..self
        }
    }

    /// Returns true if a miss is an error.
    pub fn is_strict(&self) -> bool {
        self.strict
    }

    /// Sets the longest wait for another process that is compiling the same kernel.
    #[must_use]
    pub fn patience(self, patience: Duration) -> Store {
        Store { patience, ..self }
    }

    /// Returns the directory.
    pub fn dir(&self) -> &Path {
        self.layout.cache()
    }

    /// Returns the reason the store holds and keeps nothing, if so.
    pub fn trouble(&self) -> Option<StoreError> {
        self.off.clone().map(|reason| StoreError::Off { reason })
    }

    /// Checks that the store holds kernels or can keep some. Call it for a directory that somebody
    /// named on purpose; one that is of no use is otherwise passed over.
    ///
    /// # Errors
    /// [`StoreError`] names the directory.
    pub fn check_use(&self) -> Result<(), StoreError> {
        if let Some(trouble) = self.trouble() {
            return Err(trouble);
        }
        // A store that somebody filled may be read-only: its kernels serve.
        if self.layout.version().is_dir() {
            return Ok(());
        }
        files::try_write(&self.layout, self.layout.version())
    }

    /// Returns the activity since the store was opened.
    pub fn stats(&self) -> StoreStats {
        self.counters.stats()
    }

    /// Returns the kernel under `key`. A damaged or unreadable entry is a miss; `tracing` reports
    /// it and [`Store::stats`] counts it.
    #[doc(hidden)]
    pub fn get(&self, key: &KernelKey) -> Option<StoredKernel> {
        let found = self.look(key);
        match &found {
            Some(_) => self.counters.hits.add(1),
            None => self.counters.misses.add(1),
        }
        found
    }

    /// Returns the kernel as `get` does, but counts damage only.
    pub(crate) fn look(&self, key: &KernelKey) -> Option<StoredKernel> {
        if self.off.is_some() {
            return None;
        }
        let path = self.layout.kernel(key);
        let bytes = match read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            Err(error) => {
                self.pass_over(&StoreError::io("read", &path, error));
                return None;
            }
        };
        self.counters.bytes_read.add(bytes.len() as u64);
        match format::decode(key, bytes) {
            Ok(stored) => Some(stored),
            Err(reason) => {
                self.counters.damaged.add(1);
                tracing::warn!(path = %path.display(), reason, "a cached kernel is damaged");
                None
            }
        }
    }

    /// Returns the source beside the kernel under `key`, if the kernel was made from exactly that
    /// text.
    #[doc(hidden)]
    pub fn source(&self, key: &KernelKey) -> Option<String> {
        let info = self.look(key)?.info;
        let path = self.layout.source(key, info.language);
        let text = read(&path).ok()?;
        let same = format::is_source_of(&text, &info);
        same.then(|| String::from_utf8(text).ok()).flatten()
    }

    /// Keeps a kernel, whole and checked or not at all, with its source beside it.
    ///
    /// # Errors
    /// [`StoreError`], which callers log and ignore.
    #[doc(hidden)]
    pub fn put(
        &self,
        key: &KernelKey,
        source: &KernelSource,
        stored: &StoredKernel,
    ) -> Result<(), StoreError> {
        self.put_parts(key, Some(&source.text), stored)
    }

    pub(crate) fn put_parts(
        &self,
        key: &KernelKey,
        source: Option<&str>,
        stored: &StoredKernel,
    ) -> Result<(), StoreError> {
        if let Some(trouble) = self.trouble() {
            return Err(trouble);
        }
        let path = self.layout.kernel(key);
        let bytes = format::encode(key, stored)
            .map_err(|error| StoreError::io("encode", &path, error.into()))?;
        // Disks and file systems do return other bytes than were written.
        let check = |back| match format::decode(key, back)? {
            same if same == *stored => Ok(()),
            _ => Err("another kernel".to_string()),
        };
        files::write(&self.layout, &path, &bytes, Care::Thorough(&check))?;
        self.counters.bytes_written.add(bytes.len() as u64);
        if let Some(text) = source {
            let path = self.layout.source(key, stored.info.language);
            // The source is only for people to read; the kernel works without it.
            let _ = files::write(&self.layout, &path, text.as_bytes(), Care::Quick);
        }
        Ok(())
    }

    /// Removes a kernel and its source. Returns true if the kernel existed.
    pub(crate) fn remove(&self, key: &KernelKey) -> bool {
        // Sources first: a crash in between leaves a kernel without a source, which works.
        for language in LANGUAGES {
            let _ = std::fs::remove_file(self.layout.source(key, language));
        }
        let path = self.layout.kernel(key);
        // Damage to the disk, or a person, can put a directory in the file's place.
        std::fs::remove_file(&path)
            .or_else(|error| match path.symlink_metadata() {
                Ok(meta) if meta.is_dir() => std::fs::remove_dir_all(&path),
                _ => Err(error),
            })
            .is_ok()
    }

    /// Counts and logs a failure that does not matter to the caller.
    pub(crate) fn pass_over(&self, error: &StoreError) {
        self.counters.failures.add(1);
        tracing::warn!(%error, "going on without the kernel cache");
    }
}

/// Reads a whole file, and updates its time to mark it as used.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let (bytes, file) = open_and_read(path)?;
    let modified = file.metadata()?.modified();
    let age = modified.ok().and_then(|time| time.elapsed().ok());
    if age.is_some_and(|age| age > FRESH) {
        // Fails in another user's store, which is pruned by that user's rules.
        let _ = file.set_modified(SystemTime::now());
    }
    Ok(bytes)
}

/// Reads a whole file without marking it as used.
pub(crate) fn peek(path: &Path) -> io::Result<Vec<u8>> {
    open_and_read(path).map(|(bytes, _)| bytes)
}

fn open_and_read(path: &Path) -> io::Result<(Vec<u8>, File)> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    if length > LARGEST {
        return Err(io::Error::new(
            ErrorKind::FileTooLarge,
            "too long for a kernel",
        ));
    }
    // One byte more than the file, so that `read_to_end` sees its end without growing the buffer.
    let mut bytes = Vec::with_capacity(length as usize + 1);
    file.read_to_end(&mut bytes)?;
    Ok((bytes, file))
}

/// Returns the problem of a file in the directory's place.
fn no_dir(layout: &Layout) -> Option<String> {
    let dirs = [layout.cache(), layout.version()];
    let is_file = |dir: &&Path| dir.metadata().is_ok_and(|meta| !meta.is_dir());
    let dir = dirs.into_iter().find(is_file)?;
    Some(format!(
        "{} is not a directory\nname one, or a path that is free; MOESAIC_CACHE names the default",
        dir.display()
    ))
}

#[cfg(unix)]
fn unsafe_dir(layout: &Layout) -> Option<String> {
    use std::os::unix::fs::PermissionsExt;
    let mode = |dir: &Path| dir.metadata().map_or(0, |meta| meta.permissions().mode());
    let open = |dir: &&Path| mode(dir) & 0o002 != 0;
    // In a sticky directory such as /tmp, others cannot replace our directory.
    let sticky = |dir: &&Path| *dir == layout.cache() && mode(dir) & 0o1000 != 0;
    let dirs = [layout.cache(), layout.version()];
    let dir = dirs.into_iter().find(|dir| open(dir) && !sticky(dir))?;
    Some(format!(
        "everybody can write to {0}, and what lies there is run\nchmod go-w {0}, or name another directory; MOESAIC_CACHE names the default",
        dir.display()
    ))
}

/// Returns the problem of another user's store that this user may not read.
fn closed_dir(layout: &Layout) -> Option<String> {
    let error = std::fs::read_dir(layout.version()).err()?;
    let closed = error.kind() == ErrorKind::PermissionDenied;
    closed.then(|| {
        format!(
            "{} cannot be read: permission denied\nname another directory; MOESAIC_CACHE names the default",
            layout.cache().display()
        )
    })
}

#[cfg(not(unix))]
fn unsafe_dir(_: &Layout) -> Option<String> {
    None
}
