//! Temporary folders that do not outlive their process, however that ends.
//!
//! A folder is removed when its owner drops it, by [`remove_all`] when a signal ends the
//! process, and by a later process where neither has run: each folder is locked, the system
//! lets go of a dead process's lock, and who makes the first folder of a process looks for
//! unlocked ones.

use std::collections::BTreeSet;
use std::fs::{self, File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

/// How the folders' names begin. A user's own folders have other names.
pub const PREFIX: &str = "moesaic-tmp-";
/// The least age of a folder that is taken for left behind: its owner makes it first, and locks
/// it then.
const YOUNG: Duration = Duration::from_secs(60);
/// How often a folder is removed into which a compiler still writes.
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
    /// `None` where folders have no locks: nobody takes this one for left behind.
    _lock: Option<File>,
}

impl Scratch {
    /// Makes a folder in `TMPDIR`.
    ///
    /// # Errors
    /// When it cannot be made there.
    pub fn new() -> io::Result<Scratch> {
        static FIRST: Once = Once::new();
        let path = {
            // A folder that is made while all are removed would be left behind.
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

    /// Where it is.
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

/// Removes every folder of this process, which is about to end: whoever makes another one from
/// now on, or drops one, waits for that end.
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

/// The lock of a folder; `None` where another process has it, or there are no locks.
fn lock(folder: &Path) -> Option<File> {
    let file = File::open(folder).ok()?;
    file.try_lock().ok().map(|()| file)
}

/// Removes what dead processes of the same user have left in a folder.
fn prune(around: &Path, own: &Metadata) {
    for entry in fs::read_dir(around).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        // Not of what a link points to.
        let Ok(found) = entry.metadata() else {
            continue;
        };
        let age = found.modified().ok().and_then(|time| time.elapsed().ok());
        let old = age.is_some_and(|age| age > YOUNG);
        if !(found.is_dir() && old && same_owner(&found, own)) {
            continue;
        }
        // Held while it is removed, so that two processes do not both do it.
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
