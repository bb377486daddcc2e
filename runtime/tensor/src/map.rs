//! Files mapped into memory.

use memmap2::Mmap;
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};

/// A file mapped read-only into memory. The system reads a page at its first access, and may drop
/// it again.
///
/// Nobody may truncate the file meanwhile, because the system would end the process at the next
/// access. [`Map::is_whole`] detects it beforehand, but cannot exclude it during a later read.
#[derive(Debug)]
pub struct Map {
    bytes: Mmap,
    file: File,
}

impl Map {
    /// Maps a whole file.
    ///
    /// # Errors
    /// The system's error.
    pub fn new(file: &File) -> io::Result<Map> {
        // SAFETY: the mapping is private and read-only, and its bytes are only ever read as plain
        // numbers, so another process that writes to the file can change values but cannot break an
        // invariant. Truncating the file ends the process; the type's documentation says so.
        let bytes = unsafe { Mmap::map(file) }?;
        let file = file.try_clone()?;
        Ok(Map { bytes, file })
    }

    /// Returns true if the file still has all of the mapped bytes.
    ///
    /// # Errors
    /// The system's error.
    pub fn is_whole(&self) -> io::Result<bool> {
        Ok(self.file.metadata()?.len() >= self.bytes.len() as u64)
    }

    /// Frees the memory of these bytes. A later access reads them from the file again.
    pub(crate) fn release(&self, range: &Range<usize>) {
        #[cfg(unix)]
        {
            let advice = memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: pages of a private mapping that nobody has written to are equal to the file,
            // and are read from it again.
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
