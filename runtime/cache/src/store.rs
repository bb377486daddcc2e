//! The store.

use crate::fetch::Flights;
use crate::files::{self, Care};
use crate::format::{self, LARGEST};
use crate::layout::{LANGUAGES, Layout};
use crate::stats::Counters;
use crate::{Key, Stats, StoreError, Stored, home};
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

/// How long a process waits for another that compiles the same kernel, unless
/// [`Store::patience`] says otherwise: a third of the deadline that ranks have for each other,
/// so that a rank which waits in vain compiles and is still in time.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Hits refresh a file's time at most this often, to know what is in use
/// without a write for every read.
const FRESH: Duration = Duration::from_secs(24 * 60 * 60);

impl Store {
    /// The store in `dir`, which need not exist: the first kernel makes it.
    /// A directory that everybody can write to is not used, since a hit is
    /// loaded as code; see [`Store::trouble`].
    pub fn open(dir: impl Into<PathBuf>) -> Store {
        let layout = Layout::new(dir.into());
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

    /// The store of this user, see [`home`]. Without a home directory it is a
    /// store that holds nothing.
    pub fn open_default() -> Store {
        match home() {
            Ok(dir) => Store::open(dir),
            Err(error) => Store {
                off: Some(error.to_string()),
                ..Store::open(PathBuf::new())
            },
        }
    }

    /// The same store, but a miss is an error, never a compile.
    #[must_use]
    pub fn strict(self) -> Store {
        Store {
            strict: true,
            ..self
        }
    }

    /// Whether a miss is an error.
    pub fn is_strict(&self) -> bool {
        self.strict
    }

    /// The same store, waiting at most this long for another process that is
    /// compiling the same kernel.
    #[must_use]
    pub fn patience(self, patience: Duration) -> Store {
        Store { patience, ..self }
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        self.layout.cache()
    }

    /// Why the store holds nothing and keeps nothing, if so.
    pub fn trouble(&self) -> Option<StoreError> {
        self.off.clone().map(|reason| StoreError::Off { reason })
    }

    /// What it did since it was opened.
    pub fn stats(&self) -> Stats {
        self.counters.stats()
    }

    /// The kernel under `key`. A damaged or unreadable entry is a miss, told
    /// to `tracing` and counted in [`Store::stats`].
    pub fn get(&self, key: &Key) -> Option<Stored> {
        let found = self.look(key);
        match &found {
            Some(_) => self.counters.hits.add(1),
            None => self.counters.misses.add(1),
        }
        found
    }

    /// Like `get`, but damage alone is counted.
    pub(crate) fn look(&self, key: &Key) -> Option<Stored> {
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

    /// The source that lies beside the kernel under `key`, if it is still the
    /// one the kernel was made from.
    pub fn source(&self, key: &Key) -> Option<String> {
        let info = self.look(key)?.info;
        let path = self.layout.source(key, info.language);
        let text = String::from_utf8(read(&path).ok()?).ok()?;
        (format::hash_source(&text) == info.source_hash).then_some(text)
    }

    /// Keeps a kernel, whole and checked or not at all, and its source beside
    /// it.
    ///
    /// # Errors
    /// [`StoreError`], which a caller logs and passes over.
    pub fn put(&self, key: &Key, source: &KernelSource, stored: &Stored) -> Result<(), StoreError> {
        self.put_parts(key, Some(&source.text), stored)
    }

    pub(crate) fn put_parts(
        &self,
        key: &Key,
        source: Option<&str>,
        stored: &Stored,
    ) -> Result<(), StoreError> {
        if let Some(trouble) = self.trouble() {
            return Err(trouble);
        }
        let path = self.layout.kernel(key);
        let bytes = format::encode(key, stored)
            .map_err(|error| StoreError::io("encode", &path, error.into()))?;
        let check = |back| match format::decode(key, back)? {
            same if same == *stored => Ok(()),
            _ => Err("another kernel".to_string()),
        };
        files::write(&self.layout, &path, &bytes, Care::Thorough(&check))?;
        self.counters.bytes_written.add(bytes.len() as u64);
        if let Some(text) = source {
            let path = self.layout.source(key, stored.info.language);
            // For people only: a kernel is as good without it.
            let _ = files::write(&self.layout, &path, text.as_bytes(), Care::Quick);
        }
        Ok(())
    }

    /// Removes a kernel and its source; whether the kernel was there.
    pub(crate) fn remove(&self, key: &Key) -> bool {
        for language in LANGUAGES {
            let _ = std::fs::remove_file(self.layout.source(key, language));
        }
        let path = self.layout.kernel(key);
        // A damaged disk, or a person, can put a directory in its place.
        std::fs::remove_file(&path)
            .or_else(|error| match path.symlink_metadata() {
                Ok(meta) if meta.is_dir() => std::fs::remove_dir_all(&path),
                _ => Err(error),
            })
            .is_ok()
    }

    /// Counts a failure that does not matter to the caller, and tells it.
    pub(crate) fn pass_over(&self, error: &StoreError) {
        self.counters.failures.add(1);
        tracing::warn!(%error, "going on without the kernel cache");
    }
}

/// Reads a whole file, and notes that it was used.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let (bytes, file) = open_and_read(path)?;
    let modified = file.metadata()?.modified();
    let age = modified.ok().and_then(|time| time.elapsed().ok());
    if age.is_some_and(|age| age > FRESH) {
        // Fails in a store of somebody else's, which prunes by its own rules.
        let _ = file.set_modified(SystemTime::now());
    }
    Ok(bytes)
}

/// Reads a whole file without a trace.
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
    let mut bytes = Vec::with_capacity(length as usize + 1);
    file.read_to_end(&mut bytes)?;
    Ok((bytes, file))
}

/// A file where the directory should be.
fn no_dir(layout: &Layout) -> Option<String> {
    let dirs = [layout.cache(), layout.version()];
    let is_file = |dir: &&Path| dir.metadata().is_ok_and(|meta| !meta.is_dir());
    let dir = dirs.into_iter().find(is_file)?;
    Some(format!(
        "{} is not a directory\nset MOESAIC_CACHE to one, or to a name that is free",
        dir.display()
    ))
}

#[cfg(unix)]
fn unsafe_dir(layout: &Layout) -> Option<String> {
    use std::os::unix::fs::PermissionsExt;
    let mode = |dir: &Path| dir.metadata().map_or(0, |meta| meta.permissions().mode());
    let open = |dir: &&Path| mode(dir) & 0o002 != 0;
    // Others cannot replace our directory inside a sticky one such as /tmp.
    let sticky = |dir: &&Path| *dir == layout.cache() && mode(dir) & 0o1000 != 0;
    let dirs = [layout.cache(), layout.version()];
    let dir = dirs.into_iter().find(|dir| open(dir) && !sticky(dir))?;
    Some(format!(
        "everybody can write to {0}, and what lies there is run\nchmod go-w {0}, or set MOESAIC_CACHE to another directory",
        dir.display()
    ))
}

/// A store of somebody else's that is not ours to read.
fn closed_dir(layout: &Layout) -> Option<String> {
    let error = std::fs::read_dir(layout.version()).err()?;
    let closed = error.kind() == ErrorKind::PermissionDenied;
    closed.then(|| {
        format!(
            "{} cannot be read: permission denied\nset MOESAIC_CACHE to another directory",
            layout.cache().display()
        )
    })
}

#[cfg(not(unix))]
fn unsafe_dir(_: &Layout) -> Option<String> {
    None
}
