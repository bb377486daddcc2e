//! Temporary folders that do not outlive their process, however it ends.
//!
//! A folder is removed when its owner drops it, by [`remove_all`] when a signal ends the process,
//! or else by a later process. Each folder is locked, and the system releases a dead process's
//! lock, so the first folder that a process makes triggers a search for unlocked ones.

use std::collections::BTreeSet;
use std::fs::{self, File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

/// Prefix of the folders' names, which users' own folders do not have.
pub const PREFIX: &str = "moesaic-tmp-";
/// The least age at which an unlocked folder counts as abandoned, because its owner makes it first
/// and locks it afterwards.
const YOUNG: Duration = Duration::from_secs(60);
/// The number of attempts to remove a folder into which a compiler still writes.
const TRIES: u32 = 20;

/// The folders of this process.
static OPEN: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn open() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A temporary folder that only this user can read, removed when it is dropped.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    /// The lock; `None` on file systems without locks, where nobody removes this folder as
    /// abandoned.
    _lock: Option<File>,
}

impl Scratch {
    /// Makes a folder in `TMPDIR`.
    ///
    /// # Errors
    /// If the folder cannot be made.
    pub fn new() -> io::Result<Scratch> {
        static FIRST: Once = Once::new();
        let path = {
            // Hold the list while making the folder, so that `remove_all` cannot miss it.
            let mut open = open();
            let made = tempfile::Builder::new().prefix(PREFIX).tempdir()?.keep();
            open.insert(made.clone());
            made
        };
        let scratch = Scratch {
            _lock: lock(&path),
            path,
        };
        FIRST.call_once(|| {
            if let (Some(around), Ok(own)) = (scratch.path.parent(), scratch.path.metadata()) {
                prune(around, &own);
            }
        });
        Ok(scratch)
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let mut open = open();
        let _ = fs::remove_dir_all(&self.path);
        open.remove(&self.path);
    }
}

/// Removes every folder of this process, which is about to end. Threads that make or drop a folder
/// from now on block until the process ends.
pub fn remove_all() {
    let open = open();
    for path in &*open {
        for _ in 0..TRIES {
            match fs::remove_dir_all(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                _ => break,
            }
        }
    }
    std::mem::forget(open);
}

/// Locks a folder; `None` if another process holds the lock, or there are no locks.
fn lock(folder: &Path) -> Option<File> {
    let file = File::open(folder).ok()?;
    file.try_lock().ok().map(|()| file)
}

/// Removes the folders that dead processes of the same user have left in `around`.
fn prune(around: &Path, own: &Metadata) {
    for entry in fs::read_dir(around).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        // `metadata` of the entry itself, so that a link is not followed.
        let Ok(found) = entry.metadata() else {
            continue;
        };
        let age = found.modified().ok().and_then(|time| time.elapsed().ok());
        let old = age.is_some_and(|age| age > YOUNG);
        if !(found.is_dir() && old && same_owner(&found, own)) {
            continue;
        }
        // The lock is held during the removal, so that two processes do not both remove it.
        if let Some(_lock) = lock(&entry.path()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(unix)]
fn same_owner(one: &Metadata, other: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    one.uid() == other.uid()
}

#[cfg(not(unix))]
fn same_owner(_: &Metadata, _: &Metadata) -> bool {
    true
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn a_folder_ends_with_its_owner() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path().to_path_buf();
        fs::write(path.join("kernel.c"), "int x;").unwrap();
        assert!(open().contains(&path));
        assert!(lock(&path).is_none(), "another process would remove it");
        drop(scratch);
        assert!(!path.exists() && !open().contains(&path));
    }

    #[test]
    fn only_what_dead_processes_left_is_removed() {
        let around = tempfile::tempdir().unwrap();
        let make = |name: &str, age: u64| {
            let path = around.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::write(path.join("kernel.c"), "").unwrap();
            let time = SystemTime::now() - Duration::from_secs(age);
            File::open(&path).unwrap().set_modified(time).unwrap();
            path
        };
        let left = make(&format!("{PREFIX}dead"), 3600);
        let held = make(&format!("{PREFIX}held"), 3600);
        let young = make(&format!("{PREFIX}young"), 0);
        let mine = make("moesaic-results", 3600);
        let link = around.path().join(format!("{PREFIX}link"));
        std::os::unix::fs::symlink(&mine, &link).unwrap();
        let _held = lock(&held).unwrap();
        prune(around.path(), &around.path().metadata().unwrap());
        assert!(!left.exists());
        for kept in [held, young, mine.join("kernel.c"), link] {
            assert!(kept.exists(), "{}", kept.display());
        }
    }
}
