//! One lock per kernel and machine.

use crate::layout::Layout;
use crate::{KernelKey, files};
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// A lock held while a kernel is compiled, so that other processes wait for the result. It is
/// advisory: a process that cannot get it compiles anyway.
pub(crate) struct MachineLock {
    path: PathBuf,
    _file: File,
}

impl MachineLock {
    /// Waits for the lock for at most `patience`. Returns `None` if it is still held then, or if
    /// the file system has no locks.
    pub(crate) fn acquire(
        layout: &Layout,
        key: &KernelKey,
        patience: Duration,
    ) -> Option<MachineLock> {
        let path = layout.lock(key);
        files::make_dir(layout, path.parent()?).ok()?;
        let file = File::options().create(true).append(true).open(&path).ok()?;
        let deadline = Instant::now() + patience;
        let mut pause = Duration::from_millis(1);
        loop {
            match file.try_lock() {
                Ok(()) => {
                    return Some(MachineLock { path, _file: file });
                }
                Err(TryLockError::Error(_)) => return None,
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return None,
                Err(TryLockError::WouldBlock) => sleep(pause),
            }
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }
}

impl Drop for MachineLock {
    fn drop(&mut self) {
        // The file is removed before the lock is released. A process waiting on the removed file
        // gets its lock next and finds the kernel; a later process finds the kernel too.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Returns true if nobody holds the lock, as after a process was killed.
pub(crate) fn is_abandoned(path: &Path) -> bool {
    File::options()
        .append(true)
        .open(path)
        .is_ok_and(|file| file.try_lock().is_ok())
}
