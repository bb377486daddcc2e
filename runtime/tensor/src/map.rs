//! Files in memory.

use memmap2::Mmap;
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};

/// A file mapped into memory, read-only: the system reads a page of it when it is
/// first looked at, and may take it back.
///
/// The file must not be cut short meanwhile: the system would end the process on
/// the next access. [`Map::is_whole`] finds out before it, but not at the same time.
#[derive(Debug)]
pub struct Map {
    bytes: Mmap,
    file: File,
}

impl Map {
    /// Maps a whole file.
    ///
    /// # Errors
    /// Those of the system.
    pub fn new(file: &File) -> io::Result<Map> {
        // SAFETY: the mapping is private and read-only, and its bytes are only
        // ever read as plain numbers, so another process that writes to the
        // file can change values but cannot break an invariant. Cutting the
        // file short ends the process; the type's documentation says so.
        let bytes = unsafe { Mmap::map(file) }?;
        let file = file.try_clone()?;
        Ok(Map { bytes, file })
    }

    /// Whether the file still has all bytes that are mapped.
    ///
    /// # Errors
    /// Those of the system.
    pub fn is_whole(&self) -> io::Result<bool> {
        Ok(self.file.metadata()?.len() >= self.bytes.len() as u64)
    }

    /// Gives the memory of these bytes back: they are read from the file again
    /// when they are looked at again.
    pub(crate) fn release(&self, range: &Range<usize>) {
        #[cfg(unix)]
        {
            let advice = memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: pages of a private mapping that nobody has written to hold
            // what the file does, and come back from there.
            let done = unsafe {
                self.bytes
                    .unchecked_advise_range(advice, range.start, range.len())
            };
            drop(done); // a refusal costs memory only
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}
