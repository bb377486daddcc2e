//! The memory of the device: a file that programs map, divided into
//! allocations.

use crate::program::RunError;
use moesaic_target::{DeviceError, FreeMemory, SystemError};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The address at which emulated programs map it, far from their text and
/// stack.
pub(crate) const START: u64 = 0x10_0000_0000;

/// Bytes of the memory. The file is sparse, so unwritten pages take no memory;
/// an emulator keeps a record of each page, so the file is no larger.
pub(crate) const BYTES: u64 = 1 << 30;

/// Alignment of allocations. Each ends with a fence of at least half as many
/// bytes.
const ALIGN: u64 = 128;

/// Content of a fence: as a float of any type a large negative number, so that
/// reading one shows as well.
const FENCE: u8 = 0xfb;

/// The file and the owners of its parts.
pub(crate) struct Memory {
    file: File,
    parts: Mutex<Parts>,
}

/// The requested bytes of each allocation, and the length of each
/// gap, by start.
#[derive(Default)]
struct Parts {
    used: BTreeMap<u64, u64>,
    free: BTreeMap<u64, u64>,
}

impl Memory {
    pub(crate) fn new() -> io::Result<Memory> {
        let file = anonymous_file()?;
        file.set_len(BYTES)?;
        let parts = Parts {
            free: BTreeMap::from([(0, BYTES)]),
            ..Parts::default()
        };
        Ok(Memory {
            file,
            parts: Mutex::new(parts),
        })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Returns the address of `bytes` new bytes, all of them 0xFF.
    pub(crate) fn alloc(&self, bytes: usize) -> Result<u64, DeviceError> {
        let size = whole(bytes as u64);
        let mut parts = self.lock();
        let Some(start) = parts.take(bytes as u64, size) else {
            let free = FreeMemory::LargestGap(parts.largest_gap());
            return Err(DeviceError::OutOfMemory { asked: bytes, free });
        };
        // Bytes of 0xff are NaN in every float type and -1 as integers, so a
        // result that depends on unwritten memory shows.
        let mut contents = vec![FENCE; size as usize];
        contents[..bytes].fill(0xff);
        let written = self.file.write_all_at(&contents, start);
        written.map_err(|error| failed("filling new memory", error))?;
        Ok(START + start)
    }

    pub(crate) fn free(&self, address: u64) {
        self.lock().give_back(address - START);
    }

    pub(crate) fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let written = self.file.write_all_at(bytes, address - START);
        written.map_err(|error| failed("upload", error))
    }

    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let read = self.file.read_exact_at(bytes, address - START);
        read.map_err(|error| failed("download", error))
    }

    /// Checks that every fence is intact; an error names the damaged one.
    pub(crate) fn check_fences(&self) -> Result<(), RunError> {
        let mut fence = [0; 2 * ALIGN as usize];
        for (start, bytes) in &self.lock().used {
            let fence = &mut fence[..(whole(*bytes) - bytes) as usize];
            // Read through the file and not through a mapping: this process
            // has none, and a program that ends leaves the file as it was.
            let read = self.file.read_exact_at(fence, start + bytes);
            read.map_err(RunError::Fence)?;
            if let Some(at) = fence.iter().position(|byte| *byte != FENCE) {
                let address = START + start;
                return Err(RunError::Beyond {
                    at,
                    bytes: *bytes,
                    address,
                });
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Parts> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the size of an allocation with its fence.
const fn whole(bytes: u64) -> u64 {
    (bytes + ALIGN / 2).next_multiple_of(ALIGN)
}

impl Parts {
    /// Takes the first gap that is large enough.
    fn take(&mut self, bytes: u64, size: u64) -> Option<u64> {
        let (&start, &length) = self.free.iter().find(|(_, length)| **length >= size)?;
        self.free.remove(&start);
        if length > size {
            self.free.insert(start + size, length - size);
        }
        self.used.insert(start, bytes);
        Some(start)
    }

    /// Frees an allocation and joins gaps that touch.
    fn give_back(&mut self, start: u64) {
        let Some(bytes) = self.used.remove(&start) else {
            return;
        };
        let (mut first, mut length) = (start, whole(bytes));
        if let Some(next) = self.free.remove(&(first + length)) {
            length += next;
        }
        let before = self.free.range(..first).next_back();
        if let Some((&gap, &size)) = before
            && gap + size == first
        {
            first = gap;
            length += size;
        }
        self.free.insert(first, length);
    }

    fn largest_gap(&self) -> u64 {
        self.free.values().max().copied().unwrap_or(0)
    }
}

fn failed(operation: &str, error: io::Error) -> DeviceError {
    DeviceError::Driver {
        operation: operation.to_string(),
        reason: SystemError::from(error).into(),
    }
}

#[cfg(target_os = "linux")]
fn anonymous_file() -> io::Result<File> {
    use std::os::fd::FromRawFd;
    // SAFETY: the name is a terminated string; the call has no other demands.
    let fd = unsafe { libc::memfd_create(c"moesaic-emulated".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and belongs to nobody else.
    Ok(unsafe { File::from_raw_fd(fd) })
}

#[cfg(not(target_os = "linux"))]
fn anonymous_file() -> io::Result<File> {
    tempfile::tempfile()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_memory_is_one_gap_again() {
        let memory = Memory::new().unwrap();
        let addresses: Vec<u64> = [0, 1, 64, 4096, 65]
            .iter()
            .map(|bytes| memory.alloc(*bytes).unwrap())
            .collect();
        assert!(addresses.iter().all(|address| address % 64 == 0));
        for i in [1, 3, 2, 0, 4] {
            memory.free(addresses[i]);
        }
        assert_eq!(memory.lock().free, BTreeMap::from([(0, BYTES)]));
        assert!(memory.lock().used.is_empty());
    }

    #[test]
    fn a_byte_behind_the_end_is_seen() {
        let memory = Memory::new().unwrap();
        let [first, _second] = [100, 128].map(|bytes| memory.alloc(bytes).unwrap());
        memory.write(first, &[0; 100]).unwrap();
        memory.check_fences().unwrap();
        memory.write(first, &[0; 103]).unwrap();
        let words = memory.check_fences().unwrap_err().to_string();
        assert!(
            words.contains("0 bytes behind the end of the 100 bytes"),
            "{words}"
        );
    }

    #[test]
    fn too_much_is_refused() {
        let memory = Memory::new().unwrap();
        let error = memory.alloc(2 << 30).unwrap_err().to_string();
        assert!(error.contains("2147483648"), "{error}");
    }
}
