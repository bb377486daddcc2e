//! A file of the output: written under a temporary name by several threads, then renamed.

use super::{QuantizeError, QuantizeEvent};
use crate::WeightsError;
use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

/// The layout of a file: a header, then tensors at known places.
pub(super) struct Layout {
    pub header: Vec<u8>,
    /// Bytes of the whole file.
    pub bytes: u64,
}

/// A file under its temporary name, or a finished one that stays. Dropping it unfinished removes the
/// temporary file.
pub(super) struct Output {
    /// The name until the file is finished. None compares with the file at `path`.
    temporary: Option<PathBuf>,
    path: PathBuf,
    state: Mutex<State>,
}

struct State {
    file: Option<File>,
    checksum: u64,
}

impl Output {
    /// Starts a file. A temporary file of an interrupted run is overwritten.
    pub fn create(path: &Path, layout: &Layout) -> Result<Output, QuantizeError> {
        let temporary = temporary(path);
        let mut file = File::create(&temporary).map_err(QuantizeError::write(path))?;
        // Reserves nothing on most systems, but fails at once where files are limited.
        let begun = file.set_len(layout.bytes);
        let begun = begun.and_then(|()| file.write_all(&layout.header));
        let output = Output::new(Some(temporary), path, file, layout);
        begun.map_err(QuantizeError::write(path))?;
        Ok(output)
    }

    /// Opens a file of this layout that stays if it holds exactly what would be written.
    pub fn compare(path: &Path, layout: &Layout) -> Result<Output, QuantizeError> {
        let file = File::open(path).map_err(WeightsError::io(path))?;
        Ok(Output::new(None, path, file, layout))
    }

    fn new(temporary: Option<PathBuf>, path: &Path, file: File, layout: &Layout) -> Output {
        Output {
            temporary,
            path: path.to_path_buf(),
            state: Mutex::new(State {
                file: Some(file),
                checksum: checksum(0, &layout.header),
            }),
        }
    }

    /// Writes bytes at a place, or checks that they are there.
    pub fn put(&self, place: u64, bytes: &[u8]) -> Result<(), QuantizeError> {
        // The sum does not depend on the order in which threads write.
        let own = checksum(place, bytes);
        let mut state = lock(&self.state);
        state.checksum = state.checksum.wrapping_add(own);
        let Some(file) = &mut state.file else {
            return Ok(());
        };
        if self.temporary.is_none() {
            return match has_bytes(file, place, bytes) {
                Ok(true) => Ok(()),
                Ok(false) => Err(QuantizeError::InTheWay {
                    path: self.path.clone(),
                }),
                Err(error) => Err(WeightsError::io(&self.path)(error).into()),
            };
        }
        let written = file.seek(SeekFrom::Start(place));
        let written = written.and_then(|_| file.write_all(bytes));
        written.map_err(QuantizeError::write(&self.path))
    }

    /// Returns the checksum of everything that was written.
    pub fn checksum(&self) -> u64 {
        lock(&self.state).checksum
    }

    /// Gives the file its name.
    pub fn finish(self) -> Result<(), QuantizeError> {
        let mut state = lock(&self.state);
        if let (Some(file), Some(temporary)) = (state.file.take(), &self.temporary) {
            // Data must be on disk before the name makes it visible.
            let named = file
                .sync_all()
                .and_then(|()| fs::rename(temporary, &self.path));
            if let Err(error) = named {
                let _ = fs::remove_file(temporary);
                return Err(QuantizeError::write(&self.path)(error));
            }
        }
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        let state = self
            .state
            .get_mut()
            .unwrap_or_else(|broken| broken.into_inner());
        if let (Some(_), Some(temporary)) = (state.file.take(), &self.temporary) {
            let _ = fs::remove_file(temporary);
        }
    }
}

fn temporary(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".moesaic-{name}.tmp"))
}

/// Locks what threads share, even if one of them panicked: its panic ends the run anyway.
pub(super) fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes a small file in the same way. `crate::write` gives temporary files random names, and those
/// of killed runs would stay in the folder.
pub(super) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), QuantizeError> {
    let layout = Layout {
        header: bytes.to_vec(),
        bytes: bytes.len() as u64,
    };
    Output::create(path, &layout)?.finish()
}

/// A number that depends on bytes and their place (FNV-1a over words of 64 bits).
struct Checksum(u64);

impl Checksum {
    fn new(place: u64) -> Checksum {
        let mut sum = Checksum(0xcbf2_9ce4_8422_2325);
        sum.word(place);
        sum
    }

    fn word(&mut self, word: u64) {
        self.0 = (self.0 ^ word)
            .wrapping_mul(0x0100_0000_01b3)
            .rotate_left(29);
    }

    fn add(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.word(u64::from_le_bytes(word));
        }
    }
}

fn checksum(place: u64, bytes: &[u8]) -> u64 {
    let mut sum = Checksum::new(place);
    sum.add(bytes);
    sum.0
}

/// Returns true if a file begins with the header of a layout, and has its length.
pub(super) fn has_header(path: &Path, layout: &Layout) -> std::io::Result<bool> {
    let mut file = File::open(path)?;
    if file.metadata()?.len() != layout.bytes {
        return Ok(false);
    }
    let mut header = vec![0; layout.header.len()];
    file.read_exact(&mut header)?;
    Ok(header == layout.header)
}

/// Returns true if a file holds these bytes at a place.
fn has_bytes(file: &mut File, place: u64, bytes: &[u8]) -> std::io::Result<bool> {
    file.seek(SeekFrom::Start(place))?;
    let mut part = vec![0; (1 << 20).min(bytes.len())];
    for wanted in bytes.chunks(part.len().max(1)) {
        let found = &mut part[..wanted.len()];
        file.read_exact(found)?;
        if found != wanted {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns true if a file has this layout and, read at these places, this checksum.
pub(super) fn is_whole(
    path: &Path,
    layout: &Layout,
    places: &[(u64, u64)],
    wanted: u64,
) -> std::io::Result<bool> {
    if !has_header(path, layout)? {
        return Ok(false);
    }
    let mut file = File::open(path)?;
    let mut sum = checksum(0, &layout.header);
    for (place, bytes) in places {
        file.seek(SeekFrom::Start(*place))?;
        let (mut own, mut left) = (Checksum::new(*place), (&mut file).take(*bytes));
        // A whole number of words, so that the parts have the sum of the whole.
        let mut part = vec![0; (1 << 20).min(*bytes as usize)];
        while left.limit() > 0 {
            let count = part.len().min(left.limit() as usize);
            left.read_exact(&mut part[..count])?;
            own.add(&part[..count]);
        }
        sum = sum.wrapping_add(own.0);
    }
    Ok(sum == wanted)
}

/// Does each piece of work on one of several threads. Stops at the first error.
pub(super) fn each<W: Send>(
    work: Vec<W>,
    watch: &(dyn Fn(QuantizeEvent<'_>) + Sync),
    done: impl Fn(&W) -> Result<u64, QuantizeError> + Sync,
) -> Result<(), QuantizeError> {
    let threads = thread::available_parallelism()
        .map_or(1, |n| n.get())
        .min(16);
    let (queue, failed) = (Mutex::new(VecDeque::from(work)), Mutex::new(None));
    let next = || {
        let stopped = lock(&failed).is_some();
        if stopped {
            None
        } else {
            lock(&queue).pop_front()
        }
    };
    let run = || {
        while let Some(work) = next() {
            match done(&work) {
                Ok(bytes) => watch(QuantizeEvent::Done { bytes }),
                Err(error) => {
                    lock(&failed).get_or_insert(error);
                }
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(run);
        }
        run();
    });
    lock(&failed).take().map_or(Ok(()), Err)
}
